"""Convolutions, pooling, resampling."""

from __future__ import annotations

from typing import Any

from sbp.frontend.translation import Context, reshaped, translation
from sbp.ops import library as ops


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _with_bias(out: Any, bias: Any) -> Any:
    if bias is None:
        return out
    return ops.add(out, ops.reshape(bias, shape=(bias.shape[0], *(1,) * (len(out.shape) - 2))))


def _padding(padding: Any, weight: Any, dilation: Any) -> tuple[Any, Any]:
    """Padding of both sides alike, and what is wanted at the ends beyond it: of "same" the odd place is at the end."""
    if padding == "valid":
        return 0, None
    if padding != "same":
        return _tuple(padding), None
    count = len(weight.shape) - 2
    spread = dilation if isinstance(dilation, (list, tuple)) and len(dilation) == count else [dilation] * count
    spread = [item[0] if isinstance(item, (list, tuple)) else item for item in spread]
    total = [step * (size - 1) for step, size in zip(spread, weight.shape[2:])]
    return tuple(size // 2 for size in total), [size % 2 for size in total]


@translation("aten.conv1d", "aten.conv2d", "aten.conv3d")
def conv(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
         dilation: Any = 1, groups: int = 1) -> Any:  # fmt: skip
    """x (n, c, *spatial), or without the batch, weight (o, c / groups, *kernel)."""
    batched = len(x.shape) == len(weight.shape)
    x = x if batched else reshaped(x, (1, *x.shape))
    sides, extra = _padding(padding, weight, dilation)
    if extra and any(extra):
        x = ops.pad(x, before=(0,) * len(x.shape), after=(0, 0, *extra))
    out = ops.convolution(
        x, weight, stride=_tuple(stride), padding=sides, dilation=_tuple(dilation), groups=groups
    )
    return reshaped(_with_bias(out, bias), context.shape)


@translation("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def conv_transpose(context: Context, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                   output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Any:  # fmt: skip
    """x (n, c, *spatial), weight (c, o / groups, *kernel)."""
    count = len(weight.shape) - 2
    sizes = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    options = {key: _tuple(value) * count if len(_tuple(value)) == 1 else _tuple(value)
               for key, value in sizes.items() if not isinstance(value, int)}  # fmt: skip
    options |= {key: value for key, value in sizes.items() if isinstance(value, int)}
    x = x if len(x.shape) == len(weight.shape) else reshaped(x, (1, *x.shape))
    return reshaped(_with_bias(ops.conv_transpose(x, weight, groups=groups, **options), bias), context.shape)


@translation("aten.convolution")
def _(context, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    if transposed:
        return conv_transpose(context, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(context, x, weight, bias, stride, padding, dilation, groups)


def _one(value: Any) -> Any:
    """A number that stands alone in a list for all dimensions."""
    value = _tuple(value)
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _max_pool(context: Context, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
              ceil_mode: bool = False) -> Any:  # fmt: skip
    if ceil_mode or _one(dilation) != 1:
        raise NotImplementedError("max_pool with ceil_mode or dilation")
    pool = (ops.max_pool1d, ops.max_pool2d, ops.max_pool3d)[len(x.shape) - 3]
    return pool(x, kernel_size=_one(kernel), stride=_one(stride) if stride else None, padding=_one(padding))


for _rank in (1, 2, 3):
    translation(f"aten.max_pool{_rank}d")(_max_pool)


@translation("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def _(context, *arguments):
    return _max_pool(context, *arguments), None


def _avg_pool(context: Context, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
              count_include_pad: bool = True, divisor_override: Any = None) -> Any:  # fmt: skip
    if ceil_mode or divisor_override is not None:
        raise NotImplementedError("avg_pool with ceil_mode or divisor_override")
    pool = (ops.avg_pool1d, ops.avg_pool2d, ops.avg_pool3d)[len(x.shape) - 3]
    options = {"kernel_size": _one(kernel), "stride": _one(stride) if stride else None, "padding": _one(padding)}
    return pool(x, count_include_pad=count_include_pad, **options)


for _rank in (1, 2, 3):
    translation(f"aten.avg_pool{_rank}d")(_avg_pool)

for _rank, _function in enumerate((ops.adaptive_avg_pool1d, ops.adaptive_avg_pool2d, ops.adaptive_avg_pool3d), 1):
    translation(f"aten.adaptive_avg_pool{_rank}d", f"aten._adaptive_avg_pool{_rank}d")(
        lambda context, x, size, function=_function: function(x, _one(size))
    )


@translation("aten.adaptive_max_pool2d")
def _(context, x, size):
    return ops.adaptive_max_pool2d(x, _one(size)), None
