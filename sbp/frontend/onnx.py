"""ONNX models as logical graphs, on the same footing as PyTorch modules.

::

    imported = import_onnx("model.onnx", sizes={"batch": 64})
    plan = auto_parallel(imported.graph, "a100-80g")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbp.errors import FrontendError, SbpError
from sbp.frontend.onnx_operators import Node, element_type, onnx_translation
from sbp.frontend.translation import drop_unused
from sbp.graph import Graph, Initial
from sbp.operator import TensorType, parse_type
from sbp.optim import Optimizer, optimizer_named
from sbp.passes.precision import Precision, with_precision
from sbp.trace import GraphBuilder, Symbol
from sbp.training import add_training

if TYPE_CHECKING:
    import numpy

__all__ = ["ImportedOnnx", "Node", "import_onnx", "onnx_translation"]

MOST_CONSTANT_ELEMENTS = 1 << 20
"""Larger initializers are state even where only shapes could depend on them; computed constants stay below it too."""


@dataclass(frozen=True)
class ImportedOnnx:
    """An ONNX model as a graph.

    Parameters
    ----------
    graph, forward
        The step, and its forward part (the same for inference).
    state
        State value -> the initializer that it starts from.
    inputs, outputs
        Names of the model's inputs, and of its outputs -> value.
    """

    graph: Graph
    forward: Graph
    state: Mapping[str, numpy.ndarray]
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]

    def state_arrays(self) -> dict[str, numpy.ndarray]:
        """The initializers by value name, without copies."""
        return dict(self.state)

    def __repr__(self) -> str:
        return f"<ImportedOnnx {self.graph}>"


def import_onnx(
    model: Any,
    *,
    sizes: Mapping[str, int] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Mapping[str, str] | None = None,
    optimizer: Optimizer | str | None = None,
    precision: str | Precision | None = None,
    name: str | None = None,
) -> ImportedOnnx:
    """Import an ONNX model.

    Parameters
    ----------
    model
        A file's path, or an `onnx.ModelProto`.
    sizes
        Sizes of the model's symbolic dimensions by their names, such as {"batch": 64}.
    loss
        Makes a training step: `loss(*outputs, *targets)` in operators of `sbp`, a scalar. Default: inference.
    targets
        Further inputs of the loss by name, as types such as "i64[64]".
    optimizer, precision
        See `sbp.training.training_step`; default of `precision`: the model's own element types.

    Raises
    ------
    FrontendError
        onnx is not installed; the file cannot be read; a symbolic size is not given; operators without translation,
        all in one error.
    """
    try:
        import onnx
    except ImportError:
        raise FrontendError("onnx is not installed; install onnx (or sbp[onnx]) to import its models.") from None
    if loss is None and (optimizer is not None or targets):
        raise FrontendError("without a loss there is no training step; leave optimizer and targets out, or give loss.")
    if isinstance(model, (str, Path)):
        try:
            model = onnx.load(str(model))
        except FileNotFoundError:
            raise FrontendError(f"there is no file {model}.") from None
        except Exception as error:
            raise FrontendError(f"{model} is no ONNX model: {type(error).__name__}: {error}") from None
    work = _Translator(model, dict(sizes or {}), name or model.graph.name or "onnx")
    outputs = work.run()
    builder = work.builder
    results = list(outputs.values())
    if loss is not None:
        with builder, builder.at("forward", "loss"):
            given = [
                builder.source(key, kind, "input", _initial(kind))
                for key, kind in ((key, parse_type(text)) for key, text in (targets or {}).items())
            ]
            results = [loss(*results, *given)]
    drop_unused(builder, [symbol.name for symbol in results])
    graph = builder.finish(results)
    if precision is not None:
        graph = with_precision(graph, precision)
    step = graph
    if loss is not None:
        step = add_training(graph, None if optimizer is None else optimizer_named(optimizer))
    names = ["loss"] if loss is not None else list(outputs)
    state = {key: value for key, value in work.state.items() if key in graph.values}
    inputs = tuple(key for key in work.inputs if key in graph.values)
    return ImportedOnnx(step, graph, state, inputs, dict(zip(names, graph.outputs)))


class _Translator:
    """Walks the nodes; a value is a symbol, or an array where it is known at import."""

    def __init__(self, model: Any, sizes: dict[str, int], name: str) -> None:
        self.model = model
        self.sizes = sizes
        self.builder = GraphBuilder(name)
        self.known: dict[str, Any] = {}
        self.initializers: dict[str, Any] = {}
        self.symbols: dict[str, Symbol] = {}
        self.state: dict[str, Any] = {}
        self.inputs: list[str] = []
        self.unknown: list[str] = []
        self.opset = max((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), default=1)

    def run(self) -> dict[str, Symbol]:
        """The outputs by name."""
        graph = self.model.graph
        for item in graph.initializer:
            self.initializers[item.name] = item
        for item in graph.input:
            if item.name not in self.initializers:
                self._declare(item)
        for node in graph.node:
            self._translate(node)
        if self.unknown:
            raise FrontendError(_unknown_message(self.builder.name, self.unknown))
        with self.builder:
            return {item.name: self._symbol(item.name) for item in graph.output}

    def _declare(self, item: Any) -> None:
        shape = []
        for dimension in item.type.tensor_type.shape.dim:
            if dimension.dim_param:
                if dimension.dim_param not in self.sizes:
                    raise FrontendError(
                        f"{self.builder.name}: input {item.name} has the symbolic dimension {dimension.dim_param!r}; "
                        f"give sizes={{{dimension.dim_param!r}: ...}}."
                    )
                shape.append(self.sizes[dimension.dim_param])
            else:
                shape.append(dimension.dim_value)
        kind = TensorType(tuple(shape), element_type(item.type.tensor_type.elem_type))
        self.inputs.append(item.name)
        self.symbols[item.name] = self.builder.source(item.name, kind, "input", _initial(kind))

    def _array(self, name: str) -> Any:
        """The value where it is known at import: a computed constant, or an initializer that is not trained."""
        from onnx import numpy_helper

        if name in self.known:
            return self.known[name]
        item = self.initializers.get(name)
        if item is None:
            return None
        total = 1
        for size in item.dims:
            total *= size
        if total > MOST_CONSTANT_ELEMENTS:
            return None
        return numpy_helper.to_array(item, str(getattr(self.model, "base_dir", "")))

    def _symbol(self, name: str) -> Symbol:
        """The value as a symbol; an initializer becomes state, a constant numbers in the graph or a buffer."""
        from onnx import numpy_helper

        if name in self.symbols:
            return self.symbols[name]
        if name in self.initializers:
            array = numpy_helper.to_array(self.initializers[name], str(getattr(self.model, "base_dir", "")))
        else:
            array = self.known[name]
        self.symbols[name] = self._state(name, array)
        return self.symbols[name]

    def _state(self, name: str, array: Any) -> Symbol:
        import numpy

        kind = TensorType(array.shape, str(array.dtype))
        flat = array.reshape(-1)
        if flat.size and bool((flat == flat[0]).all()) and (name in self.known or not array.ndim):
            with self.builder:
                return _filled(flat[0].item(), kind)
        floating = numpy.issubdtype(array.dtype, numpy.floating)
        trained = floating and name in self.initializers and array.ndim > 0
        self.state[name] = array
        initial = Initial("normal", (float(array.mean()), float(array.std()))) if floating and array.size else None
        return self.builder.source(name, kind, "parameter" if trained else "buffer", initial)

    def _translate(self, node: Any) -> None:
        from onnx import helper

        attributes = {item.name: _plain(helper.get_attribute_value(item)) for item in node.attribute}
        names = list(node.input)
        arrays = [self._array(name) if name else None for name in names]
        if node.op_type == "Shape":
            shape = self._shape_of(names[0])
            if shape is not None:
                self.known[node.output[0]] = _part(shape, attributes)
                return
        if all(array is not None or not name for array, name in zip(arrays, names)) and self._fold(node, names, arrays):
            return
        entry = onnx_translation.find(node.op_type)
        label = f"{node.op_type} ({node.name or node.output[0]})"
        if entry is None or node.domain not in ("", "ai.onnx", "com.microsoft"):
            self.unknown.append(f"{node.domain + '.' if node.domain else ''}{label}")
            self._stand_in(node)
            return
        given = Node(
            self.builder,
            node.name,
            attributes,
            lambda index: arrays[index] if index < len(arrays) else None,
            sum(bool(name) for name in node.output),
            self.opset,
        )
        path = _path(node)
        try:
            with self.builder, self.builder.at("forward", path):
                symbols = [self._symbol(name) if name else None for name in names]
                while symbols and symbols[-1] is None:
                    symbols.pop()
                found = entry.function(given, *symbols)
        except FrontendError:
            raise
        except (SbpError, NotImplementedError, KeyError, TypeError, AttributeError, IndexError) as error:
            known = isinstance(error, (SbpError, NotImplementedError))
            self.unknown.append(f"{label}: {error if known else f'{type(error).__name__}: {error}'}")
            self._stand_in(node)
            return
        results = found if isinstance(found, (tuple, list)) else (found,)
        for name, symbol in zip(node.output, results):
            if name:
                self.symbols[name] = symbol

    def _shape_of(self, name: str) -> Any:
        import numpy

        if name in self.symbols:
            return numpy.array(self.symbols[name].shape, dtype=numpy.int64)
        if name in self.initializers:
            return numpy.array(self.initializers[name].dims, dtype=numpy.int64)
        return numpy.array(self.known[name].shape, dtype=numpy.int64) if name in self.known else None

    def _fold(self, node: Any, names: list[str], arrays: list[Any]) -> bool:
        """Compute a node of constants with ONNX's own reference implementation; False where it is better a node."""
        from onnx.reference import ReferenceEvaluator

        trained = any(name in self.initializers and array.dtype.kind == "f" and array.ndim > 0
                      for name, array in zip(names, arrays) if array is not None)  # fmt: skip
        if trained:
            return False
        try:
            run = ReferenceEvaluator(node, opsets={"": self.opset})
            found = run.run(None, {name: array for name, array in zip(names, arrays) if name})
        except Exception:
            return False
        if any(getattr(item, "size", 0) > MOST_CONSTANT_ELEMENTS for item in found):
            return False
        self.known.update((name, item) for name, item in zip(node.output, found) if name)
        return True

    def _stand_in(self, node: Any) -> None:
        """Lets the walk go on after an unknown operator, with the types that the file declares."""
        declared = {item.name: item for item in (*self.model.graph.value_info, *self.model.graph.output)}
        for name in node.output:
            if not name:
                continue
            item = declared.get(name)
            shape: tuple[int, ...] = ()
            kind = "f32"
            if item is not None and item.type.tensor_type.elem_type:
                dimensions = item.type.tensor_type.shape.dim
                shape = tuple(self.sizes.get(d.dim_param, 1) if d.dim_param else d.dim_value for d in dimensions)
                kind = element_type(item.type.tensor_type.elem_type)
            label = self.builder.unique(f"unknown.{name}")
            self.symbols[name] = self.builder.source(label, TensorType(shape, kind), "input")


def _filled(value: Any, kind: TensorType) -> Symbol:
    from sbp.ops import library as ops

    return ops.full(shape=kind.shape, value=value, dtype=kind.dtype)


def _initial(kind: TensorType) -> Initial | None:
    return None if kind.dtype.startswith(("f", "bf")) else Initial("integers", (0, 2))


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _part(shape: Any, attributes: Mapping[str, Any]) -> Any:
    return shape[slice(attributes.get("start", 0), attributes.get("end"))]


def _path(node: Any) -> str:
    """The module that a node was exported from: PyTorch's exporter notes it, or names nodes /h/0/attn/MatMul."""
    for item in node.metadata_props:
        if item.key == "pkg.torch.onnx.name_scopes":
            scopes = [part.strip(" '\"") for part in item.value.strip("[]").split(",")]
            return scopes[-2] if len(scopes) > 1 else ""
    parts = [part for part in node.name.split("/") if part]
    return ".".join(parts[:-1]) if len(parts) > 1 else ""


def _unknown_message(name: str, unknown: list[str]) -> str:
    return (
        f"{name}: {len(unknown)} operator{'s have' if len(unknown) > 1 else ' has'} no translation:\n  "
        + "\n  ".join(unknown)
        + "\nWrite one before importing:\n"
        "  from sbp.frontend.onnx import onnx_translation\n"
        '  @onnx_translation("Name")\n'
        "  def _(node, x, ...):  # the operator's inputs as symbols; node.get(...) reads attributes\n"
        "      return ...  # in operators of sbp"
    )
