"""Every placement strategy that PyTorch's DTensor lists, against the layout rules of the operators.

For each operator that both know and each of its example calls, DTensor is asked for its strategies on a one-axis mesh
(of a fake process group: nothing runs). Each strategy is then

* admitted by our rule,
* wrong: not admitted, and run on real shards it gives other numbers than the unsharded operator,
* right and not admitted, with the reason that the operator's definition states, or without one, or
* of a kind of Partial that only DTensor has (averages, masks, norms), which stands for a sum here.

    python benchmarks/dtensor_rules.py [--mesh 2] [--json] [OPERATOR...]

Uses PyTorch's internals, as there is no public way to ask; written for PyTorch 2.13.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

from sbp import layout as our
from sbp.check_rules import case_text, signature_text
from sbp.dtype import numpy_name
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, Case, Operator
from sbp.ops import library  # noqa: F401  registers the operators
from sbp.rule import Signature
from sbp.trial import Trial

aten = torch.ops.aten
SEEDS = 3
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# -- our operators as ATen calls ---------------------------------------------------------------------------------------

_SAME_NAME = (
    "abs", "neg", "sign", "reciprocal", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "atan", "asin", "acos", "asinh", "acosh", "atanh", "sinh", "cosh", "isnan", "isinf", "floor", "ceil",
    "round", "trunc", "relu", "sigmoid", "tanh", "silu", "erf", "logical_not", "bitwise_not", "maximum",
    "minimum", "atan2", "logical_and", "logical_or", "detach", "tril", "triu", "tanh_backward",
    "sigmoid_backward", "silu_backward", "softplus",
)  # fmt: skip
_OF_TENSORS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "fmod": "fmod", "remainder": "remainder", "equal": "eq",
    "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
}  # fmt: skip


def _like(overload: Any) -> Callable[..., Call]:
    """The same tensors and attributes in the same order."""
    return lambda *inputs, **attributes: (overload, (*inputs, *attributes.values()), {})


def _axes(x: Any, axis: Any) -> list[int]:
    if axis is None:
        return list(range(x.ndim))
    return list(axis) if isinstance(axis, (tuple, list)) else [axis]


def _slice(x: Any, starts: Any, stops: Any, steps: Any = None) -> Call | None:
    """A slice of one dimension; ATen cuts one at a time."""
    bounds = [range(n)[slice(a, b, c)] for n, a, b, c in zip(x.shape, starts, stops, steps or (1,) * x.ndim)]
    cut = [at for at, bound in enumerate(bounds) if bound != range(x.shape[at])]
    if len(cut) > 1:
        return None
    at = cut[0] if cut else 0
    return aten.slice.Tensor, (x, at, bounds[at].start, bounds[at].stop, bounds[at].step), {}


def _slice_backward(grad: Any, shape: Any, starts: Any, stops: Any, steps: Any = None) -> Call | None:
    whole = _slice(torch.empty(tuple(shape), device="meta"), starts, stops, steps)
    return whole and (aten.slice_backward.default, (grad, list(shape), *whole[1][1:]), {})


def _matmul(x: Any, w: Any) -> Call | None:
    if x.ndim == w.ndim == 2:
        return aten.mm.default, (x, w), {}
    return (aten.bmm.default, (x, w), {}) if x.ndim == w.ndim == 3 and x.shape[0] == w.shape[0] else None


def _squeeze(x: Any, axis: Any = None) -> Call:
    ones = [at for at, size in enumerate(x.shape) if size == 1]
    return aten.squeeze.dims, (x, ones if axis is None else _axes(x, axis)), {}


def _convolution(x: Any, weight: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Call:
    count = x.ndim - 2
    wide = [[value] * count if isinstance(value, int) else list(value) for value in (stride, padding, dilation)]
    return aten.convolution.default, (x, weight, None, *wide, False, [0] * count, groups), {}


def _pool(overload: Any) -> Callable[..., Call | None]:
    def call(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, count_include_pad: bool = True):
        if x.ndim < 3 or not isinstance(kernel_size, int) and len(kernel_size) != 2:
            return None
        sizes = [
            [value] * 2 if isinstance(value, int) else list(value)
            for value in (kernel_size, stride or kernel_size, padding)
        ]
        return overload, (x, *sizes), {}

    return call


def _group_norm(x: Any, weight: Any, bias: Any, groups: int, eps: float = 1e-5) -> Call:
    n, c = x.shape[:2]
    return aten.native_group_norm.default, (x, weight, bias, n, c, x.numel() // (n * c), groups, eps), {}


def _pad(x: Any, before: Any, after: Any, value: float = 0) -> Call:
    pairs = [number for pair in reversed(list(zip(before, after))) for number in pair]
    return aten.constant_pad_nd.default, (x, pairs, value), {}


def _cast(x: Any, dtype: str) -> Call:
    return aten._to_copy.default, (x,), {"dtype": _torch_type(dtype)}


def _one_axis(overload: Any) -> Callable[..., Call | None]:
    def call(x: Any, axis: Any = None, keepdims: bool = False) -> Call | None:
        return (overload, (x, axis, keepdims), {}) if isinstance(axis, int) else None

    return call


CALLS: dict[str, Callable[..., Call | None]] = {
    **{name: _like(getattr(aten, name).default) for name in _SAME_NAME},
    **{name: _like(getattr(aten, other).Tensor) for name, other in _OF_TENSORS.items()},
    "floor_divide": lambda x, y: (aten.floor_divide.default, (x, y), {}),
    "scale": lambda x, factor: (aten.mul.Scalar, (x, factor), {}),
    "shift": lambda x, amount: (aten.add.Scalar, (x, amount), {}),
    "pow": lambda x, exponent: (aten.pow.Tensor_Scalar, (x, exponent), {}),
    "clamp": lambda x, low=None, high=None: (aten.clamp.default, (x, low, high), {}),
    "leaky_relu": lambda x, slope=0.01: (aten.leaky_relu.default, (x, slope), {}),
    "leaky_relu_backward": lambda g, x, slope=0.01: (aten.leaky_relu_backward.default, (g, x, slope, False), {}),
    "relu_backward": lambda grad, out: (aten.threshold_backward.default, (grad, out, 0), {}),
    "gelu": lambda x, approximate="none": (aten.gelu.default, (x,), {"approximate": approximate}),
    "gelu_backward": lambda g, x, approximate="none": (
        aten.gelu_backward.default, (g, x), {"approximate": approximate}
    ),
    "equal_number": lambda x, number: (aten.eq.Scalar, (x, number), {}),
    "less_number": lambda x, number: (aten.lt.Scalar, (x, number), {}),
    "greater_number": lambda x, number: (aten.gt.Scalar, (x, number), {}),
    "masked_fill": lambda x, mask, value: (aten.masked_fill.Scalar, (x, mask, value), {}),
    "where": lambda condition, x, y: (aten.where.self, (condition, x, y), {}),
    "cast": _cast,
    "dropout": lambda x, *step, rate, seed=0: None if step else (aten.native_dropout.default, (x, rate, True), {}),
    "sum": lambda x, axis=None, keepdims=False: (aten.sum.dim_IntList, (x, _axes(x, axis), keepdims), {}),
    "mean": lambda x, axis=None, keepdims=False: (aten.mean.dim, (x, _axes(x, axis), keepdims), {}),
    "max": lambda x, axis=None, keepdims=False: (aten.amax.default, (x, _axes(x, axis), keepdims), {}),
    "min": lambda x, axis=None, keepdims=False: (aten.amin.default, (x, _axes(x, axis), keepdims), {}),
    "prod": _one_axis(aten.prod.dim_int),
    "argmax": lambda x, axis=None, keepdims=False: (aten.argmax.default, (x, axis, keepdims), {}),
    "argmin": lambda x, axis=None, keepdims=False: (aten.argmin.default, (x, axis, keepdims), {}),
    "matmul": _matmul,
    "linear": lambda x, w: (aten.linear.default, (x, w), {}),
    "reshape": lambda x, shape: (aten.view.default, (x, list(shape)), {}),
    "permute": lambda x, order: (aten.permute.default, (x, list(order)), {}),
    "transpose": lambda x, first=-2, second=-1: (aten.transpose.int, (x, first, second), {}),
    "squeeze": _squeeze,
    "unsqueeze": lambda x, axis: (aten.unsqueeze.default, (x, axis), {}) if isinstance(axis, int) else None,
    "expand": lambda x, shape: (aten.expand.default, (x, list(shape)), {}),
    "slice": _slice,
    "slice_backward": _slice_backward,
    "concat": lambda *xs, axis=0: (aten.cat.default, (list(xs), axis), {}),
    "split": lambda x, sizes, axis=0: (aten.split_with_sizes.default, (x, list(sizes), axis), {}),
    "pad": _pad,
    "flip": lambda x, axis: (aten.flip.default, (x, _axes(x, axis)), {}),
    "roll": lambda x, shift, axis: (aten.roll.default, (x, [shift], [axis]), {}),
    "cumsum": lambda x, axis, reverse=False: None if reverse else (aten.cumsum.default, (x, axis), {}),
    "cumprod": lambda x, axis: (aten.cumprod.default, (x, axis), {}),
    "sort": lambda x, axis=-1, descending=False: (aten.sort.default, (x, axis, descending), {}),
    "topk": lambda x, k, axis=-1, largest=True: (aten.topk.default, (x, k, axis, largest, True), {}),
    "scatter": lambda x, index, source, axis=-1: (aten.scatter.src, (x, axis, index, source), {}),
    "take_along": lambda x, index, axis=-1: (aten.gather.default, (x, axis, index), {}),
    "embedding": lambda table, ids: (aten.embedding.default, (table, ids), {}),
    "embedding_backward": lambda g, ids, rows: (aten.embedding_dense_backward.default, (g, ids, rows, -1, False), {}),
    "softmax": lambda x, axis=-1: (aten._softmax.default, (x, axis, False), {}),
    "log_softmax": lambda x, axis=-1: (aten._log_softmax.default, (x, axis, False), {}),
    "softmax_backward": lambda g, out, axis=-1: (aten._softmax_backward_data.default, (g, out, axis, out.dtype), {}),
    "log_softmax_backward": lambda g, out, axis=-1: (
        aten._log_softmax_backward_data.default, (g, out, axis, out.dtype), {}
    ),
    "layer_norm": lambda x, w, b, eps=1e-5: (aten.native_layer_norm.default, (x, list(w.shape), w, b, eps), {}),
    "rms_norm": lambda x, w, eps=1e-6: (aten._fused_rms_norm.default, (x, list(w.shape), w, eps), {}),
    "group_norm": _group_norm,
    "convolution": _convolution,
    "max_pool2d": _pool(aten.max_pool2d_with_indices.default),
    "avg_pool2d": _pool(aten.avg_pool2d.default),
    "attention": lambda q, k, v, causal=False, **_: (
        aten._scaled_dot_product_flash_attention.default, (q, k, v, 0.0, causal), {}
    ) if q.shape == k.shape == v.shape else None,
}  # fmt: skip


def _torch_type(dtype: str) -> torch.dtype:
    return getattr(torch, "bfloat16" if dtype == "bf16" else numpy_name(dtype))


# -- what DTensor lists ------------------------------------------------------------------------------------------------

Strategy = tuple[tuple[Any, ...], tuple[Any, ...]]


def start(ranks: int) -> Any:
    """A mesh of a process group that only pretends."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,))


def is_known(overload: Any) -> bool:
    """Whether DTensor has strategies for an ATen operator."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return overload in propagator.op_single_dim_strategy_funcs or overload in propagator.op_strategy_funcs


def strategies(mesh: Any, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int) -> list[Strategy]:
    """(placements of the tensors in order, placements of the first `outputs` outputs) of every strategy."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    count = len(list(_tensors(args)))
    found: list[Strategy] = []
    single = propagator.op_single_dim_strategy_funcs.get(overload)
    if single is not None:
        function = getattr(single, "func", single)
        rows = function(overload, _mapped(args, _meta), kwargs)
        for row in rows:
            placed = [Shard(item.dim) if isinstance(item, _ShardingPlaceholder) else item for item in row]
            if len(placed) >= count + 1:
                found.append((tuple(placed[len(placed) - count :]), tuple(placed[: len(placed) - count][:outputs])))
        return list(dict.fromkeys(found))

    # Some of these functions refuse a layout by raising, so combinations are offered one by one.
    function = propagator.op_strategy_funcs[overload]
    for combination in product(*map(_placements, _tensors(args))):
        offered = iter(combination)

        def with_spec(x: torch.Tensor, offered: Iterator[Any] = offered) -> OpStrategy:
            spec = DTensorSpec(mesh, (next(offered),), tensor_meta=_meta(x))
            return OpStrategy([OpSpec(output_specs=spec, input_specs=())])

        try:
            made = function(OpSchema(overload, _mapped(args, with_spec, TupleStrategy), kwargs))
        except (RuntimeError, AssertionError, ValueError, LookupError):
            continue
        made = made if isinstance(made, OpStrategy) else made.children[0]
        for spec in made.strategies:
            specs = (
                spec.output_specs if isinstance(spec.output_specs, (tuple, list)) else (spec.output_specs,) * outputs
            )
            if any(item is None for item in specs[:outputs]):
                continue
            placed_out = tuple(item.placements[0] for item in specs[:outputs])
            # Without input_specs, the inputs are to lie as the output does.
            wanted = (spec.output_spec,) * count if spec.input_specs is None else spec.input_specs[:count]
            if len(wanted) == count:
                found.append((tuple(item.placements[0] for item in wanted), placed_out))
    return list(dict.fromkeys(found))


def _placements(x: torch.Tensor) -> list[Any]:
    return [Replicate(), *map(Shard, range(x.ndim)), *(Partial(kind) for kind in ("sum", "avg", "max", "min"))]


def _meta(x: torch.Tensor) -> TensorMeta:
    return TensorMeta(shape=x.shape, stride=x.stride(), dtype=x.dtype)


def _mapped(args: tuple[Any, ...], function: Callable, pack: Callable = list) -> tuple[Any, ...]:
    """Arguments with every tensor, also those in lists, mapped; lists of tensors are packed."""
    return tuple(
        function(item)
        if isinstance(item, torch.Tensor)
        else pack([function(x) for x in item])
        if isinstance(item, list) and item and isinstance(item[0], torch.Tensor)
        else item
        for item in args
    )


def _tensors(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for item in args:
        for x in item if isinstance(item, list) else [item]:
            if isinstance(x, torch.Tensor):
                yield x


# -- comparison --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One strategy of DTensor: `verdict` is admitted, wrong, reason, missing or foreign; `detail` says why."""

    operator: str
    aten: str
    case: str
    strategy: str
    verdict: str
    detail: str = ""


def _ours(placement: Any, rank: int) -> tuple[our.SBP, bool]:
    """The SBP of a placement, and whether it is of a kind that only DTensor has."""
    if type(placement) is Shard:
        return our.Split(placement.dim % rank if rank else 0), False
    if type(placement) is Replicate:
        return our.Broadcast(), False
    if type(placement) is Partial and placement.reduce_op in our.REDUCTIONS:
        return our.Partial(placement.reduce_op), False
    return our.Partial("sum"), True


def call_of(op: Operator, case: Case) -> tuple[Call | None, list[torch.Tensor]]:
    """The ATen call that is a case of an operator (None if there is none), and the tensors for its inputs."""
    inputs = [torch.empty(t.shape, dtype=_torch_type(t.dtype), device="meta") for t in case.types]
    make = CALLS.get(op.name)
    return (None if make is None else make(*inputs, **case.attributes)), inputs


def compare_case(op: Operator, case: Case, mesh: Any) -> list[Row]:
    """All strategies that DTensor lists for one case."""
    call, inputs = call_of(op, case)
    if call is None or not is_known(call[0]):
        return []
    overload, args, kwargs = call
    rule, made = op.bind(case.types, case.attributes), op.infer(case.types, case.attributes)
    ranks = (mesh.size(),)
    order = [next(k for k, x in enumerate(inputs) if x is tensor) for tensor in _tensors(args)]
    rows = []
    for placed_in, placed_out in strategies(mesh, overload, args, kwargs, len(made)):
        chosen: list[our.SBP] = [our.Broadcast()] * len(inputs)
        foreign = False
        for k, placement in zip(order, placed_in):
            chosen[k], other = _ours(placement, len(case.types[k].shape))
            foreign |= other
        results = []
        for t, placement in zip(made, placed_out):
            sbp, other = _ours(placement, len(t.shape))
            foreign |= other
            results.append(sbp)
        results += [our.Broadcast()] * (len(made) - len(results))
        signature = Signature(tuple(Layout((s,)) for s in chosen), tuple(Layout((s,)) for s in results))
        text = f"{', '.join(map(str, placed_in))} -> {', '.join(map(str, placed_out))}"
        rows.append(
            Row(
                op.name,
                str(overload),
                case_text(op, case),
                text,
                *_judge(op, case, rule, made, signature, ranks, foreign),
            )
        )
    return rows


def _judge(
    op: Operator, case: Case, rule: Any, made: Any, signature: Signature, ranks: tuple[int], foreign: bool
) -> tuple[str, str]:
    written = signature_text(signature.inputs, signature.outputs)
    splits = [(sbp, t) for layout, t in zip((*signature.inputs, *signature.outputs), (*case.types, *made))
              for sbp in layout if isinstance(sbp, our.Split)]  # fmt: skip
    if any(sbp.axis >= len(t.shape) for sbp, t in splits):
        return "wrong", "splits a dimension that is not there"
    if rule.admits(signature, ranks):
        return ("foreign" if foreign else "admitted"), ("admitted as a sum" if foreign else "")
    if foreign:
        return "foreign", "a Partial that is neither sum, max nor min"
    weaker = [other for other in rule.signatures(ranks) if other.inputs == signature.inputs and all(
        mine == theirs or mine[0] == our.Broadcast() and isinstance(theirs[0], our.Partial)
        for mine, theirs in zip(other.outputs, signature.outputs))]  # fmt: skip
    if weaker:
        return "admitted", f"as {signature_text(weaker[0].inputs, weaker[0].outputs)}, which is more"
    for seed in range(SEEDS):
        different = Trial(op, case, made, Mesh(ranks), seed).difference(signature.inputs, signature.outputs)
        if different:
            return "wrong", different
    for pattern, reason in op.reasons.items():
        if fnmatchcase(written, pattern):
            return "reason", reason
    return "missing", ""


def compare(names: Any = None, ranks: int = 2) -> list[Row]:
    """All strategies that DTensor lists for the cases of operators (default: all that both know)."""
    mesh = start(ranks)
    rows: list[Row] = []
    for name in names or CALLS:
        for case in REGISTRY[name].cases:
            rows += compare_case(REGISTRY[name], case, mesh)
    return rows


def ours_only(names: Any = None, ranks: int = 2) -> Counter:
    """Per operator, how many signatures our rules admit and DTensor does not list (all-broadcast apart)."""
    mesh = start(ranks)
    found: Counter = Counter()
    for name in names or CALLS:
        op = REGISTRY[name]
        for case in op.cases:
            call, inputs = call_of(op, case)
            if call is None or not is_known(call[0]):
                continue
            order = [next(k for k, x in enumerate(inputs) if x is tensor) for tensor in _tensors(call[1])]
            made = op.infer(case.types, case.attributes)
            listed = set()
            for placed_in, placed_out in strategies(mesh, *call, len(made)):
                key = [our.Broadcast()] * len(inputs)
                for k, placement in zip(order, placed_in):
                    key[k] = _ours(placement, len(case.types[k].shape))[0]
                listed.add((tuple(key), tuple(_ours(p, len(t.shape))[0] for t, p in zip(made, placed_out))))
            for signature in op.bind(case.types, case.attributes).signatures((ranks,))[1:]:
                key_of = tuple(l[0] for l in signature.inputs), tuple(l[0] for l in signature.outputs)
                found[name] += key_of not in listed
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--mesh", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = compare(options.operators, options.mesh)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    more = ours_only(options.operators, options.mesh)
    kinds = ("admitted", "wrong", "reason", "missing", "foreign")
    print(
        "operator                ATen operator                                    "
        + " ".join(f"{k:>9}" for k in kinds)
        + " ours only"
    )
    for name in dict.fromkeys(row.operator for row in rows):
        counts = Counter(row.verdict for row in rows if row.operator == name)
        overloads = ", ".join(dict.fromkeys(row.aten for row in rows if row.operator == name))
        print(f"{name:23} {overloads:48} " + " ".join(f"{counts[kind]:9}" for kind in kinds) + f" {more[name]:9}")
    total = Counter(row.verdict for row in rows)
    print(f"{'all':72} " + " ".join(f"{total[kind]:9}" for kind in kinds) + f" {sum(more.values()):9}")
    for kind in ("wrong", "missing", "reason"):
        for row in rows:
            if row.verdict == kind:
                print(f"{kind:8} {row.operator}{row.case}: {row.strategy} ({row.detail})")


if __name__ == "__main__":
    main()
