"""Every translated PyTorch operator against eager PyTorch: values and gradients, a table per family."""

from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="imports PyTorch modules")

import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_models import state_of  # noqa: E402

from sbp.errors import FrontendError  # noqa: E402
from sbp.frontend.torch import import_module  # noqa: E402
from sbp.interpreter import evaluate  # noqa: E402
from sbp.optim import SGD  # noqa: E402


class Functions(nn.Module):
    """Applies functions to (x, y, positive, numbers); gives all results."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        torch.manual_seed(3)
        self.x = nn.Parameter(torch.randn(4, 6))
        self.y = nn.Parameter(torch.randn(4, 6))
        self.p = nn.Parameter(torch.rand(4, 6) + 0.5)

    def forward(self, n):
        return [torch.as_tensor(function(self.x, self.y, self.p, n)) for function in self.functions]


def weighted(outputs):
    """A loss that every element of every floating output takes part in, with a weight of its own."""
    total = 0.0
    for number, output in enumerate(outputs):
        if output.is_floating_point():
            weights = torch.arange(1.0, output.numel() + 1).reshape(output.shape) / output.numel()
            total = total + (output * weights).sum() / (number + 1)
    return total


def check_functions(functions, tolerance=3e-5):
    """Values and gradients of functions, all in one module, against eager PyTorch."""
    module = Functions(functions)
    numbers = torch.tensor([[0, 3, 1, 5, 2, 4], [1, 1, 0, 2, 3, 5], [5, 4, 3, 2, 1, 0], [2, 2, 2, 0, 0, 1]])
    inference = import_module(module, numbers, training=False)
    found = evaluate(inference.graph, state_of(inference, n=numbers.numpy()))
    expected = module(numbers)
    for number, value in enumerate(expected):
        got = found[inference.outputs[f"output.{number}"]]
        assert got.shape == tuple(value.shape)
        scale = max(float(value.double().abs().nan_to_num(posinf=1, neginf=1).max()), 1e-3) if value.numel() else 1
        np.testing.assert_allclose(
            got, value.detach().double().numpy(), atol=tolerance * scale, err_msg=f"function {number}"
        )
    floating = [f for f, value in zip(functions, expected) if value.is_floating_point() and value.requires_grad]
    if floating:
        module = Functions(floating)
        step = import_module(module, numbers, loss=weighted, optimizer=SGD(lr=1.0))
        state = state_of(step, n=numbers.numpy())
        found = evaluate(step.graph, state)
        weighted(module(numbers)).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is None or name not in state:
                continue
            got = state[name] - found.get(name, state[name])
            scale = float(parameter.grad.abs().max())
            np.testing.assert_allclose(got, parameter.grad.numpy(), atol=tolerance * max(scale, 1e-3), err_msg=name)


POINTWISE = [
    lambda x, y, p, n: x + y, lambda x, y, p, n: x - 2 * y, lambda x, y, p, n: 3 - x, lambda x, y, p, n: x * y / p,
    lambda x, y, p, n: torch.add(x, y, alpha=0.5), lambda x, y, p, n: torch.rsub(x, y), lambda x, y, p, n: x / 4,
    lambda x, y, p, n: 2 / p, lambda x, y, p, n: x**2, lambda x, y, p, n: p**-0.5, lambda x, y, p, n: x**3,
    lambda x, y, p, n: p**y, lambda x, y, p, n: 2.0**x, lambda x, y, p, n: p**-1, lambda x, y, p, n: n + 1,
    lambda x, y, p, n: n / 2, lambda x, y, p, n: n // 2, lambda x, y, p, n: n % 3, lambda x, y, p, n: x + n,
    lambda x, y, p, n: n * 0.5, lambda x, y, p, n: torch.div(x, p, rounding_mode="floor").detach(),
    lambda x, y, p, n: torch.div(n, 2, rounding_mode="trunc"), lambda x, y, p, n: torch.maximum(x, y),
    lambda x, y, p, n: torch.minimum(x, y), lambda x, y, p, n: x.clamp(-0.5, 0.5), lambda x, y, p, n: x.clamp_min(0.1),
    lambda x, y, p, n: torch.clamp(x, max=0.2), lambda x, y, p, n: torch.where(x > 0, x, y),
    lambda x, y, p, n: torch.where(x > y, x, 0.0), lambda x, y, p, n: x.masked_fill(n > 2, -1.0),
    lambda x, y, p, n: torch.addcmul(x, y, p, value=2.0), lambda x, y, p, n: torch.addcdiv(x, y, p),
    lambda x, y, p, n: torch.lerp(x, y, 0.3), lambda x, y, p, n: torch.atan2(x, p),
    lambda x, y, p, n: x.to(torch.float64),
    lambda x, y, p, n: n.float(), lambda x, y, p, n: x.detach() * y, lambda x, y, p, n: x.type_as(p) * 2,
]  # fmt: skip
FUNCTIONS = [
    *(lambda x, y, p, n, f=f: f(x) for f in (
        torch.neg, torch.abs, torch.exp, torch.expm1, torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh,
        torch.atan, torch.asinh, torch.sigmoid, torch.tanh, torch.erf, torch.relu, F.silu, F.gelu, F.mish, F.softplus,
        F.hardswish, F.hardsigmoid, F.elu, F.selu, F.leaky_relu, F.logsigmoid, F.relu6, F.hardtanh, torch.square,
        torch.sign,
    )),
    *(lambda x, y, p, n, f=f: f(p) for f in (
        torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal,
    )),
    lambda x, y, p, n: F.gelu(x, approximate="tanh"), lambda x, y, p, n: F.glu(x, -1),
    lambda x, y, p, n: torch.asin(x / 4), lambda x, y, p, n: torch.acos(x / 4), lambda x, y, p, n: torch.atanh(x / 4),
    lambda x, y, p, n: torch.acosh(p + 1), lambda x, y, p, n: F.prelu(x, p[0, :1]),
    lambda x, y, p, n: F.softplus(x, beta=2), lambda x, y, p, n: torch.floor(x).detach(),
    lambda x, y, p, n: torch.round(x).detach(), lambda x, y, p, n: F.threshold(x, 0.1, 0.5),
]  # fmt: skip
COMPARISONS = [
    lambda x, y, p, n: x > y, lambda x, y, p, n: x <= 0.25, lambda x, y, p, n: n == 2, lambda x, y, p, n: n != 2,
    lambda x, y, p, n: n >= 3, lambda x, y, p, n: (x > 0) & (y > 0), lambda x, y, p, n: (x > 0) | (n > 2),
    lambda x, y, p, n: ~(x > 0), lambda x, y, p, n: n & 1, lambda x, y, p, n: (x > 0) ^ (y > 0),
    lambda x, y, p, n: n.bool(), lambda x, y, p, n: torch.isnan(x), lambda x, y, p, n: torch.logical_not(n),
    lambda x, y, p, n: (x > 0).any(), lambda x, y, p, n: (x > 0).all(dim=1), lambda x, y, p, n: n < x,
    lambda x, y, p, n: torch.isfinite(x), lambda x, y, p, n: n | 4,
]  # fmt: skip
VIEWS = [
    lambda x, y, p, n: x.view(2, 12), lambda x, y, p, n: x.reshape(-1), lambda x, y, p, n: x.t(),
    lambda x, y, p, n: x.view(2, 2, 6).permute(2, 0, 1), lambda x, y, p, n: x.transpose(0, 1),
    lambda x, y, p, n: x.unsqueeze(1).squeeze(1), lambda x, y, p, n: x[:, 0].unsqueeze(-1).expand(4, 3),
    lambda x, y, p, n: x[1:3, ::2], lambda x, y, p, n: x[-1], lambda x, y, p, n: x[..., 2:-1],
    lambda x, y, p, n: x.split(2, dim=1)[1], lambda x, y, p, n: x.chunk(3, 1)[2], lambda x, y, p, n: x.unbind(0)[2],
    lambda x, y, p, n: torch.cat([x, y], dim=1), lambda x, y, p, n: torch.stack([x, y], dim=-1),
    lambda x, y, p, n: x.repeat(2, 1), lambda x, y, p, n: x.repeat_interleave(2, dim=0), lambda x, y, p, n: x.flip(1),
    lambda x, y, p, n: x.roll(2, 1), lambda x, y, p, n: x.roll(1), lambda x, y, p, n: F.pad(x, (1, 2, 0, 1), value=3.0),
    lambda x, y, p, n: F.pad(x, (-1, 1)), lambda x, y, p, n: x.tril(), lambda x, y, p, n: x.triu(1),
    lambda x, y, p, n: torch.diagonal(x), lambda x, y, p, n: torch.diag_embed(x), lambda x, y, p, n: x.movedim(0, 1),
    lambda x, y, p, n: x.narrow(1, 2, 3), lambda x, y, p, n: x.unfold(1, 3, 2), lambda x, y, p, n: x.flatten(),
    lambda x, y, p, n: torch.hstack([x, y]), lambda x, y, p, n: torch.broadcast_tensors(x, y[:1])[1],
    lambda x, y, p, n: F.pad(x.unsqueeze(0), (1, 1), mode="reflect"), lambda x, y, p, n: torch.zeros_like(x) + x,
    lambda x, y, p, n: x + torch.arange(6), lambda x, y, p, n: x * torch.linspace(0, 1, 6),
    lambda x, y, p, n: x @ torch.eye(6), lambda x, y, p, n: x + torch.full((6,), 2.0), lambda x, y, p, n: x.tile(1, 2),
    lambda x, y, p, n: torch.slice_scatter(x, y[:2], 0, 1, 3), lambda x, y, p, n: torch.select_scatter(x, y[0], 0, 2),
]  # fmt: skip
REDUCTIONS = [
    lambda x, y, p, n: x.sum(), lambda x, y, p, n: x.sum(0), lambda x, y, p, n: x.mean((0, 1), keepdim=True),
    lambda x, y, p, n: p.prod(1), lambda x, y, p, n: x.amax(1), lambda x, y, p, n: x.amin((0,), keepdim=True),
    lambda x, y, p, n: x.max(), lambda x, y, p, n: x.max(dim=1)[0], lambda x, y, p, n: x.max(dim=1)[1],
    lambda x, y, p, n: x.min(dim=0, keepdim=True)[0], lambda x, y, p, n: x.argmax(1), lambda x, y, p, n: x.argmin(),
    lambda x, y, p, n: x.var(1), lambda x, y, p, n: x.var(unbiased=False), lambda x, y, p, n: x.std(0),
    lambda x, y, p, n: torch.var_mean(x, 1)[1], lambda x, y, p, n: x.logsumexp(1), lambda x, y, p, n: x.norm(),
    lambda x, y, p, n: torch.linalg.vector_norm(x, dim=1), lambda x, y, p, n: x.cumsum(1),
    lambda x, y, p, n: p.cumprod(1),
    lambda x, y, p, n: x.diff(dim=1), lambda x, y, p, n: x.topk(2, dim=1)[0], lambda x, y, p, n: x.sort(1)[0],
    lambda x, y, p, n: x.argsort(1), lambda x, y, p, n: n.sum(), lambda x, y, p, n: n.cumsum(0),
    lambda x, y, p, n: x.norm(p=1, dim=1), lambda x, y, p, n: F.normalize(x, dim=1),
]  # fmt: skip
PRODUCTS = [
    lambda x, y, p, n: x @ y.t(), lambda x, y, p, n: torch.mm(x, y.t()), lambda x, y, p, n: F.linear(x, y, p[0, :4]),
    lambda x, y, p, n: torch.bmm(x.view(2, 2, 6), y.view(2, 6, 2)), lambda x, y, p, n: x @ y[0],
    lambda x, y, p, n: x[0] @ y.t(),
    lambda x, y, p, n: torch.addmm(p[0, :4], x, y.t(), beta=0.5, alpha=2.0), lambda x, y, p, n: x[0] @ y[1],
    lambda x, y, p, n: torch.einsum("ij,kj->ik", x, y), lambda x, y, p, n: torch.outer(x[0], y[1]),
    lambda x, y, p, n: torch.baddbmm(p[:2, :2], x.view(2, 2, 6), y.view(2, 6, 2)), lambda x, y, p, n: F.linear(x[0], y),
]  # fmt: skip
NORMALIZATIONS = [
    lambda x, y, p, n: x.softmax(1), lambda x, y, p, n: F.log_softmax(x, 0),
    lambda x, y, p, n: F.softmax(x, 1, dtype=torch.float32), lambda x, y, p, n: F.layer_norm(x, (6,)),
    lambda x, y, p, n: F.layer_norm(x, (6,), p[0], y[0], 1e-3), lambda x, y, p, n: F.rms_norm(x, (6,), p[0], 1e-5),
    lambda x, y, p, n: F.layer_norm(x.view(2, 2, 6), (2, 6)), lambda x, y, p, n: F.rms_norm(x, (6,)),
    lambda x, y, p, n: F.group_norm(x.view(2, 2, 2, 3), 2), lambda x, y, p, n: F.instance_norm(x.view(2, 2, 6)),
    lambda x, y, p, n: F.batch_norm(x.view(2, 2, 6), None, None, p[0, :2], y[0, :2], training=True),
    lambda x, y, p, n: F.batch_norm(x, y[0].detach(), p[0].detach(), training=False),
    lambda x, y, p, n: F.cosine_similarity(x, y, dim=1),
]  # fmt: skip
INDEXING = [
    lambda x, y, p, n: F.embedding(n.clamp(max=3), x), lambda x, y, p, n: F.embedding(n.clamp(max=3), x, padding_idx=1),
    lambda x, y, p, n: x[:, n[0]], lambda x, y, p, n: x[n[:, 0].clamp(max=3)], lambda x, y, p, n: x.gather(1, n),
    lambda x, y, p, n: x[torch.arange(4), n[:, 1]], lambda x, y, p, n: x.index_select(1, n[0]),
    lambda x, y, p, n: x.scatter_add(1, n, y), lambda x, y, p, n: x.index_add(0, n[0].clamp(max=3), y.new_ones(6, 6)),
    lambda x, y, p, n: F.one_hot(n, 6), lambda x, y, p, n: x.scatter(1, n[:, :1], y[:, :1]),
    lambda x, y, p, n: torch.index_put(x, (torch.arange(4), n[:, 0]), y[:, 0]),
    lambda x, y, p, n: torch.index_put(x, (n[0].clamp(max=3),), y[0], accumulate=True),
    lambda x, y, p, n: F.embedding_bag(n.clamp(max=3), x, mode="sum"), lambda x, y, p, n: x.scatter(1, n[:, :1], 2.0),
    lambda x, y, p, n: torch.histc(n.float(), bins=6, min=0, max=5), lambda x, y, p, n: x.masked_scatter(n > 2, y),
    lambda x, y, p, n: x.view(2, 2, 6)[n[:2, 2].clamp(max=1), :, n[:2, 1]],
    lambda x, y, p, n: torch.as_strided(x, (6, 4), (1, 6)), lambda x, y, p, n: torch.as_strided(x, (3, 2), (2, 1), 5),
    lambda x, y, p, n: torch.as_strided(x, (2, 5, 3), (6, 0, 1), 7), lambda x, y, p, n: torch.as_strided(x, (), (), 9),
    lambda x, y, p, n: torch.as_strided(x, (10, 4), (2, 1)),
    lambda x, y, p, n: torch.as_strided(x, (4, 1, 3), (7, 9, 1)),
    lambda x, y, p, n: torch.as_strided(x, (3, 2), (1, 1)), lambda x, y, p, n: torch.as_strided(n, (2, 2), (12, 5), 1),
]  # fmt: skip
IMAGES = [
    lambda x, y, p, n: F.conv1d(x.view(2, 2, 6), y.view(3, 2, 4), p[0, :3], padding=1),
    lambda x, y, p, n: F.conv2d(x.view(1, 2, 4, 3), y.view(3, 2, 2, 2), stride=2, padding=1),
    lambda x, y, p, n: F.conv2d(x.view(1, 2, 4, 3), y.view(6, 2, 2, 1)[:, :1], groups=2, padding="same"),
    lambda x, y, p, n: F.conv_transpose2d(x.view(1, 2, 4, 3), y.view(2, 3, 2, 2), stride=2, output_padding=1),
    lambda x, y, p, n: F.max_pool2d(x.view(1, 1, 4, 6), 2),
    lambda x, y, p, n: F.max_pool2d(x.view(1, 1, 4, 6), 3, 2, 1),
    lambda x, y, p, n: F.avg_pool2d(x.view(1, 1, 4, 6), 2), lambda x, y, p, n: F.avg_pool1d(x.view(2, 2, 6), 2, 2),
    lambda x, y, p, n: F.adaptive_avg_pool2d(x.view(1, 1, 4, 6), (2, 3)),
    lambda x, y, p, n: F.max_pool1d(x.view(2, 2, 6), 2),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 4, 6), scale_factor=2),
    lambda x, y, p, n: F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 4, 6), size=(8, 3), mode="bilinear"),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 4, 6), size=(8, 12), mode="bilinear", align_corners=True),
    # Factors that do not give whole sizes: places follow the factor, not the size.
    *[lambda x, y, p, n, mode=mode: F.interpolate(x.view(1, 1, 4, 6), scale_factor=1.7, mode=mode)
      for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")],
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 4, 6), scale_factor=(0.6, 2.3), mode="bilinear"),
    lambda x, y, p, n: F.interpolate(x.view(2, 2, 6), scale_factor=1.4, mode="linear"),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 2, 3, 4), scale_factor=1.3, mode="trilinear"),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 2, 3, 4), scale_factor=1.7),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 4, 6), scale_factor=1.7, mode="bilinear", align_corners=True),
    lambda x, y, p, n: F.interpolate(x.view(1, 1, 4, 6), scale_factor=1.7, mode="bilinear",
                                     recompute_scale_factor=True),
    lambda x, y, p, n: F.pad(x.view(2, 2, 6), (2, 1), mode="reflect"),
    lambda x, y, p, n: F.pad(x.view(1, 1, 4, 6), (1, 0, 2, 3), mode="reflect"),
    lambda x, y, p, n: F.pad(x.view(1, 1, 4, 6), (7, 0, 2, 5), mode="replicate"),
    lambda x, y, p, n: F.pad(x.view(1, 1, 4, 6), (1, -2, 0, 1), mode="replicate"),
    lambda x, y, p, n: F.pad(x.view(1, 1, 2, 3, 4), (1, 0, 2, 1, 0, 1), mode="reflect"),
    lambda x, y, p, n: F.pad(x.view(1, 1, 2, 3, 4), (1, 0, 2, 1, 0, 1), mode="replicate"),
    lambda x, y, p, n: F.unfold(x.view(1, 1, 4, 6), (2, 3), stride=(1, 2), padding=1, dilation=(2, 1)),
    lambda x, y, p, n: F.unfold(x.view(2, 3, 4), 2),
    lambda x, y, p, n: F.fold(x.view(1, 4, 6), (3, 4), 2), lambda x, y, p, n: F.fold(x.view(4, 6), (3, 4), 2),
    *[lambda x, y, p, n, kind=(mode, padding, aligned): F.grid_sample(
        x.view(1, 2, 3, 4), 1.6 * torch.tanh(y.view(1, 3, 4, 2)), *kind)
      for mode, padding, aligned in product(("bilinear", "nearest"), ("zeros", "border", "reflection"), (False, True))],
    lambda x, y, p, n: F.grid_sample(x.view(1, 6, 1, 4), y.view(1, 2, 6, 2), padding_mode="reflection",
                                     align_corners=True),
]  # fmt: skip
LOSSES = [
    lambda x, y, p, n: F.cross_entropy(x, n[:, 1]), lambda x, y, p, n: F.cross_entropy(x, n[:, 1], reduction="none"),
    lambda x, y, p, n: F.cross_entropy(x, n[:, 1], ignore_index=1), lambda x, y, p, n: F.mse_loss(x, y),
    lambda x, y, p, n: F.cross_entropy(x.view(2, 6, 2), n[:2, :2]), lambda x, y, p, n: F.cross_entropy(x, y.softmax(1)),
    lambda x, y, p, n: F.nll_loss(F.log_softmax(x, 1), n[:, 1]), lambda x, y, p, n: F.l1_loss(x, y, reduction="sum"),
    lambda x, y, p, n: F.smooth_l1_loss(x, y, beta=0.5), lambda x, y, p, n: F.huber_loss(x, y, delta=0.5),
    lambda x, y, p, n: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    lambda x, y, p, n: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    lambda x, y, p, n: F.kl_div(F.log_softmax(x, 1), y.softmax(1), reduction="batchmean"),
]  # fmt: skip


def heads(x, count=2):
    return x.view(1, count, -1, 2)


ATTENTION = [
    lambda x, y, p, n: F.scaled_dot_product_attention(heads(x), heads(y), heads(p)),
    lambda x, y, p, n: F.scaled_dot_product_attention(heads(x), heads(y), heads(p), is_causal=True, scale=0.3),
    lambda x, y, p, n: F.scaled_dot_product_attention(heads(x), heads(y), heads(p), n[0][:, None] + n[1] > 1),
    lambda x, y, p, n: F.scaled_dot_product_attention(heads(x), heads(y), heads(p), n[0][:, None] * 0.3 + n[1]),
    lambda x, y, p, n: F.scaled_dot_product_attention(
        heads(x, 4), heads(y)[:, :, :3], heads(p)[:, :, :3], enable_gqa=True
    ),
    lambda x, y, p, n: F.scaled_dot_product_attention(x[None], y[None], p[None]),
]  # fmt: skip


@pytest.mark.parametrize(
    "functions",
    [
        POINTWISE, FUNCTIONS, COMPARISONS, VIEWS, REDUCTIONS, PRODUCTS, NORMALIZATIONS, INDEXING, IMAGES, LOSSES,
        ATTENTION,
    ],
    ids=["pointwise", "functions", "comparisons", "views", "reductions", "products", "normalizations", "indexing",
         "images", "losses", "attention"],
)  # fmt: skip
def test_operators_equal_eager_pytorch(functions):
    check_functions(functions)


class Shuffled(nn.Module):
    def forward(self, x):
        order = torch.randperm(x.shape[0])
        return x[order], order


def test_random_orders_are_orders():
    program = import_module(Shuffled(), torch.zeros(97), training=False)
    x = np.random.default_rng(0).standard_normal(97)
    found = evaluate(program.graph, state_of(program, x=x))
    shuffled, order = (found[program.outputs[f"output.{number}"]] for number in (0, 1))
    assert sorted(order.tolist()) == list(range(97)) and (order != np.arange(97)).sum() > 80
    np.testing.assert_array_equal(shuffled, x[order])


def test_strides_over_what_is_not_there_are_refused():
    class View(nn.Module):
        def forward(self, x):
            return torch.as_strided(x.t(), (2, 2), (1, 2))

    with pytest.raises(FrontendError, match="as_strided of a tensor that is itself a view"):
        import_module(View(), torch.zeros(3, 4), training=False)
