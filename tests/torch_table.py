"""For each differentiable operator the PyTorch function that computes the same, or the reason why there is none.

A function takes the tensors, then the operator's attributes by name.
"""

import math

import torch
from torch.nn import functional


def adjoint(forward, shape):
    """The gradient of a linear function of `shape` from that of its output, differentiable itself."""

    def run(grad):
        x = torch.zeros(shape, dtype=grad.dtype, requires_grad=True)
        return torch.autograd.grad(forward(x), x, grad, create_graph=True)[0]

    return run


def slices(x, starts, stops, steps):
    return x[tuple(slice(*each) for each in zip(starts, stops, steps or (1,) * x.ndim))]


def padded(x, before, after, value=0):
    return functional.pad(x, [n for pair in reversed(list(zip(before, after))) for n in pair], value=value)


def convolution(x, weight, *, stride=1, padding=0, dilation=1, groups=1):
    count = x.ndim - 2
    pads = (padding,) * count if isinstance(padding, int) else padding
    sides = [n for each in reversed(pads) for n in ((each, each) if isinstance(each, int) else each)]
    apply = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[count]
    return apply(functional.pad(x, sides), weight, None, stride, 0, dilation, groups)


def weight_gradient(grad, x, *, shape, **where):
    weight = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
    return torch.autograd.grad(convolution(x, weight, **where), weight, grad, create_graph=True)[0]


def pool(functions):
    def run(x, *, kernel_size, stride=None, padding=0, **more):
        sizes = (kernel_size,) * 2 if isinstance(kernel_size, int) else kernel_size
        count = len(sizes)
        cells = x.reshape(math.prod(x.shape[: x.ndim - count]), 1, *x.shape[x.ndim - count :])
        made = functions[count](cells, sizes, stride=stride, padding=padding, **more)
        return made.reshape(*x.shape[: x.ndim - count], *made.shape[2:])

    return run


max_pool = pool({1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d})
avg_pool = pool({1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d})


def avg_pool_backward(grad, *, size, **where):
    sizes = where["kernel_size"]
    count = 2 if isinstance(sizes, int) else len(sizes)
    return adjoint(lambda x: avg_pool(x, **where), (*grad.shape[: grad.ndim - count], *size))(grad)


def windows(x, *, kernel_size, stride=1, padding=0, dilation=1):
    count = len(kernel_size)
    steps, spreads, pads = ((n,) * count if isinstance(n, int) else n for n in (stride, dilation, padding))
    x = functional.pad(x, [n for each in reversed(pads) for n in (each, each)])
    for kernel, step, spread in zip(kernel_size, steps, spreads):
        x = x.unfold(x.ndim - count, spread * (kernel - 1) + 1, step)[..., ::spread]
    return x.movedim(tuple(range(-2 * count, -count)), tuple(range(-count, 0)))


def sum_windows(x, *, size, **where):
    lead = x.shape[: x.ndim - 2 * len(where["kernel_size"])]
    return adjoint(lambda cells: windows(cells, **where), (*lead, *size))(x)


def attention(q, k, v, mask=None, *, causal=False, scale=None, offset=0):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril(offset) if causal else allowed
    allowed = allowed if mask is None else allowed & mask
    made = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed.expand(1, 1, *allowed.shape[-2:]) if
                                                   allowed.ndim == 2 else allowed, scale=scale)  # fmt: skip
    return torch.where(allowed.any(-1, keepdim=True), made, 0.0)


def attention_sums(q, k, v, peak, mask=None, *, causal=False, scale=None, offset=0):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    allowed = allowed.tril(offset) if causal else allowed
    allowed = allowed if mask is None else allowed & mask
    weights = torch.exp(scores - peak[..., None]) * allowed
    return weights @ v, weights.sum(-1)


def layer_norm(x, weight, bias, *, eps=1e-5):
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x, weight, *, eps=1e-6):
    return functional.rms_norm(x, weight.shape, weight, eps)


def tabled(values, index):
    """Rows by number, zeros for numbers outside."""
    inside = (index >= 0) & (index < values.shape[0])
    return values[index.clamp(0, values.shape[0] - 1)] * inside[..., None]


def taken(x, index, axis=-1):
    inside = (index >= 0) & (index < x.shape[axis])
    return torch.where(inside, torch.gather(x, axis, index.clamp(0, x.shape[axis] - 1)), 0)


def put_rows(x, index, rows):
    out = x.clone()
    for place, row in zip(index.reshape(-1).tolist(), rows.reshape(-1, x.shape[1])):
        if 0 <= place < len(out):
            out = torch.cat([out[:place], row[None], out[place + 1 :]])
    return out


def scattered(reduce):
    def run(x, index, source, *, axis=-1):
        size = x.shape[axis]
        spare = torch.cat([x, x.narrow(axis, 0, 1)], dim=axis)  # a place for what lies outside
        place = torch.where((index >= 0) & (index < size), index, size)
        made = spare.scatter_reduce(axis, place, source, reduce) if reduce else spare.scatter(axis, place, source)
        return made.narrow(axis, 0, size)

    return run


def reduced(function):
    def run(x, *, axis=None, keepdims=False):
        dims = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        return function(x, dims, keepdims)

    return run


def product(x, dims, keepdims):
    for dim in sorted((d % x.ndim for d in dims), reverse=True):
        x = x.prod(dim, keepdim=keepdims)
    return x


def axes(function):
    return lambda x, *, axis: function(x, axis)


def lower_triangle(x):
    row, column = torch.tril_indices(x.shape[-2], x.shape[-1], -1)
    return x[..., row, column]


def rotated(x, theta=10000.0, offset=0, interleaved=False, inverse=False):
    s, d = x.shape[-2:]
    angle = (torch.arange(s, dtype=x.dtype) + offset)[:, None] * theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def rotated_halves(x, cos, sin, *, inverse=False):
    def turn(y):
        first, second = y.chunk(2, dim=-1)
        return torch.cat([second, -first] if inverse else [-second, first], dim=-1)

    return x * cos + (turn(x * sin) if inverse else turn(x) * sin)


def group_masks(rows, ends):
    """(groups, rows): which rows lie in which group, from the end before to its own."""
    stops = ends.clamp(0, rows)
    starts = torch.cat([stops.new_zeros(1), stops[:-1]])
    row = torch.arange(rows)
    return ((row >= starts[:, None]) & (row < stops[:, None])).double()


def grouped_matmul(x, w, ends):
    return torch.einsum("et,tk,ekn->tn", group_masks(x.shape[0], ends), x, w)


def grouped_weight_gradient(x, y, ends, groups=None):
    return torch.einsum("et,tk,tn->ekn", group_masks(x.shape[0], ends), x, y)


def squeezed(x, *, axis=None):
    return x.squeeze() if axis is None else x.squeeze(axis)


def unsqueezed(x, *, axis):
    for dim in sorted((axis,) if isinstance(axis, int) else axis):
        x = x.unsqueeze(dim)
    return x


TYPES = {"i64": torch.int64, "i32": torch.int32, "bool": torch.bool}

TABLE = {
    **{name: getattr(torch, name) for name in (
        "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "cos", "cosh", "div", "erf",
        "exp", "expm1", "floor", "fmod", "log", "log1p", "matmul", "maximum", "minimum", "mul", "neg",
        "outer", "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt",
        "square", "sub", "tan", "tanh", "trunc", "where",
    )},
    "attention": attention,
    "attention_sums": attention_sums,
    "avg_pool2d": avg_pool,
    "avg_pool2d_backward": avg_pool_backward,
    "cast": lambda x, *, dtype: x.to(TYPES.get(dtype, torch.float64)),
    "clamp": lambda x, *, low=None, high=None: x.clamp(low, high),
    "concat": lambda *xs, axis=0: torch.cat(xs, dim=axis),
    "convolution": convolution,
    "convolution_input_gradient": lambda grad, w, *, shape, **k: adjoint(lambda x: convolution(x, w, **k), shape)(grad),
    "convolution_weight_gradient": weight_gradient,
    "cummax": axes(torch.cummax),
    "cummin": axes(torch.cummin),
    "cumprod": axes(torch.cumprod),
    "cumsum": lambda x, *, axis, reverse=False: x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis),
    "einsum": lambda *xs, subscripts: torch.einsum(subscripts, *xs),
    "embedding": tabled,
    "embedding_backward": lambda g, i, *, rows: adjoint(lambda t: tabled(t, i), (rows, g.shape[-1]))(g),
    "expand": lambda x, *, shape: x.expand(shape),
    "floor_divide": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "flip": lambda x, *, axis: x.flip(axis),
    "gelu": lambda x, *, approximate="none": functional.gelu(x, approximate=approximate),
    "group_norm": lambda x, w, b, *, groups, eps=1e-5: functional.group_norm(x, groups, w, b, eps),
    "grouped_matmul": grouped_matmul,
    "grouped_weight_gradient": grouped_weight_gradient,
    "layer_norm": layer_norm,
    "leaky_relu": lambda x, *, slope=0.01: functional.leaky_relu(x, slope),
    "linear": functional.linear,
    "log_softmax": lambda x, *, axis=-1: torch.log_softmax(x, axis),
    "logcumsumexp": axes(torch.logcumsumexp),
    "lower_triangle": lower_triangle,
    "lower_triangle_backward": lambda g, *, size: adjoint(lower_triangle, (*g.shape[:-1], size, size))(g),
    "masked_attention": attention,
    "masked_fill": lambda x, mask, *, value: torch.where(mask, torch.as_tensor(value, dtype=x.dtype), x),
    "max": reduced(torch.amax),
    "max_pool2d": max_pool,
    "mean": lambda x, *, axis=None, keepdims=False: reduced(torch.mean)(x, axis=axis, keepdims=keepdims),
    "min": reduced(torch.amin),
    "pad": padded,
    "permute": lambda x, *, order: x.permute(order),
    "pick": lambda x, index: taken(x, index[..., None])[..., 0],
    "pick_backward": lambda g, i, *, size: adjoint(lambda x: taken(x, i[..., None])[..., 0], (*g.shape, size))(g),
    "pow": lambda x, *, exponent: x**exponent,
    "prod": reduced(product),
    "put_rows": put_rows,
    "reshape": lambda x, *, shape: x.reshape(shape),
    "rms_norm": rms_norm,
    "roll": lambda x, *, shift, axis: x.roll(shift, axis),
    "rotary": rotated,
    "rotate_halves": rotated_halves,
    "scale": lambda x, *, factor: x * factor,
    "scatter": scattered(None),
    "scatter_max": scattered("amax"),
    "scatter_min": scattered("amin"),
    "shift": lambda x, *, amount: x + amount,
    "silu": functional.silu,
    "slice": lambda x, *, starts, stops, steps=None: slices(x, starts, stops, steps),
    "slice_backward": lambda g, *, shape, starts, stops, steps=None: adjoint(
        lambda x: slices(x, starts, stops, steps), shape)(g),
    "sliding_windows": windows,
    "softmax": lambda x, *, axis=-1: torch.softmax(x, axis),
    "softplus": functional.softplus,
    "sort": lambda x, *, axis=-1, descending=False: torch.sort(x, dim=axis, descending=descending, stable=True),
    "split": lambda x, *, sizes, axis=0: torch.split(x, sizes, dim=axis),
    "squeeze": squeezed,
    "sum": reduced(lambda x, dims, keepdims: torch.sum(x, dims, keepdims) if dims else x),
    "sum_exp": lambda x, maximum: torch.exp(x - maximum[..., None]).sum(-1),
    "sum_windows": sum_windows,
    "take_along": taken,
    "take_along_backward": lambda g, i, *, size, axis=-1: adjoint(
        lambda x: taken(x, i, axis), [size if n == axis % g.ndim else each for n, each in enumerate(g.shape)])(g),
    "topk": lambda x, *, k, axis=-1, largest=True: torch.topk(x, k, dim=axis, largest=largest),
    "transpose": lambda x, *, first=-2, second=-1: x.transpose(first, second),
    "tril": lambda x, *, diagonal=0: x.tril(diagonal),
    "triu": lambda x, *, diagonal=0: x.triu(diagonal),
    "unsqueeze": unsqueezed,
    "linear_weight_gradient": lambda g, x: torch.einsum("...n,...k->nk", g, x),
}  # fmt: skip
"""Operator -> the function of PyTorch."""

PART = "a step of a composite whose whole gradient it is; the composite is compared in {}"
EXPERTS = "no function of PyTorch routes tokens to slots; tests/test_ops_experts.py compares with a loop over tokens"
RANDOM = "its numbers are this library's own, the same whatever the layout; tests/test_ops_random.py has their laws"
REASONS = {
    "batch_norm_apply": PART.format("tests/test_ops_normalization.py"),
    "combine": EXPERTS,
    "detach": "it has no gradient, by definition",
    "dispatch": EXPERTS,
    "dropout": RANDOM,
    "log_probability": PART.format("tests/test_ops_loss.py"),
    "random_normal": RANDOM,
    "random_uniform": RANDOM,
    "resample": "one axis of an interpolation or adaptive mean, which tests/test_ops_resampling.py compares as a whole",
    "resample_backward": "the adjoint of resample, compared through it",
    "routing_weights": EXPERTS,
}
"""Operator -> why it has none."""
