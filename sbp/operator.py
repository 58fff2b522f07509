"""Operators: one object each, holding kernel, rule, FLOP, gradient; and the registry that names them.

The kernel's own parameters say what the operator takes: the first is the array module (NumPy, CuPy), then the tensors,
then keyword-only attributes. Everything else follows from the rule unless it is given::

    @operator("*b m k+, *b k+ n -> *b m n", linear="each")
    def matmul(xp, x, w):
        "Batched matrix product: x (*b, m, k), w (*b, k, n) -> (*b, m, n)."
        return xp.matmul(x, w)

    matmul.flops = lambda b, m, k, n: 2 * b * m * k * n

    @matmul.gradient
    def _(grad, x, w):
        return matmul(grad, transpose(w)), matmul(transpose(x), grad)
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import index as whole
from typing import Any

from sbp.borders import fetched_bytes
from sbp.dtype import SIZES, dtype_named
from sbp.errors import GraphError, RuleError
from sbp.layout import Layout, Shard
from sbp.mesh import Mesh
from sbp.rule import BoundRule, Passing, Rule, Signature, bind, parse_rule

Attributes = dict[str, Any]
RuleSource = str | Callable[..., "str | tuple[str, dict[str, int]]"]
PassingSource = str | Callable[..., str]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and element type."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "shape", tuple(map(whole, self.shape)))
        except TypeError:
            raise GraphError(f"a shape is whole numbers in a tuple, such as (8, 16), got {self.shape!r}.") from None
        if any(size < 0 for size in self.shape):
            raise GraphError(f"a shape has sizes of at least 0, got {list(self.shape)}.")
        object.__setattr__(self, "dtype", dtype_named(self.dtype))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


CURRENT: ContextVar[Any] = ContextVar("what operators without tensor inputs are applied to", default=None)
"""Holds the graph builder (anything with `apply(op, inputs, attributes)`) of the innermost `with builder:`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One example call of an operator, on which its rule is proven by brute force.

    `ranges` gives (low, high) for inputs by name where random numbers must stay inside (indices, positive numbers).
    """

    types: tuple[TensorType, ...]
    attributes: Attributes
    ranges: Mapping[str, tuple[float, float]]


class Operator:
    """One operator, all of it in one place. Made by the `operator` decorator; called with symbols, it adds a node to
    the graph being built; called with arrays, it runs its kernel.

    Attributes that can be set after creation: `flops` (a function of the rule's named dimensions, returning FLOP;
    default one per output element), `traffic` (the same, returning bytes read and written; default all operands
    once; may also name `itemsize`, the bytes of an output element), `workspace` (the same, returning bytes that a
    device's kernel holds while it runs, besides its operands; default none), `product` (the same, returning the
    sizes (batch, m, n, k) of the matrix product that does its FLOP; default none), `view` (true where the output is
    the first input's elements in the same order, so that it shares its memory), `reasons` (a signature that would
    be right but is not admitted, as text -> why). These functions may name attributes, `elements` (those of the
    largest operand) and `elements_out` (those of all outputs), all of them local to a rank.
    """

    def __init__(
        self,
        kernel: Callable,
        rule: RuleSource,
        *,
        name: str | None = None,
        linear: PassingSource = "",
        monotone: PassingSource = "",
        antitone: PassingSource = "",
        passes: Sequence[tuple[str, str, str]] = (),
        outputs: Sequence[str] = ("out",),
        dtype: str | Callable[..., str | Sequence[str]] | None = None,
    ) -> None:
        if not callable(kernel) or not isinstance(name or "", str):
            raise RuleError(f"an operator is a function with a name, got {kernel!r} named {name!r}.")
        self.kernel = kernel
        self.name = name or kernel.__name__
        self.__doc__ = kernel.__doc__
        self.__name__ = self.name
        parameters = list(inspect.signature(kernel).parameters.values())[1:]
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.input_names = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self.defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.output_names = tuple(name.removeprefix("*") for name in outputs)
        self._many = any(name.startswith("*") for name in outputs)  # the attributes say how many there are
        self.several = len(self.output_names) > 1 or self._many
        self.rule = rule
        self._passing = (linear, monotone, antitone)
        self._passes = tuple(passes)
        # What is wrong in a definition is reported where it stands.
        if any(isinstance(item, str) or len(item) != 3 for item in self._passes):
            raise RuleError(f"operator {self.name}: passes has triples such as ('all', 'max', 'max'), got {passes!r}.")
        for text in (*self._passing, *(group for group, _, _ in self._passes)):
            if not callable(text):
                tuple(self._groups(text, len(self.input_names), 1))
        if not callable(rule):
            try:
                count = len(self.parse(rule).inputs)
            except RuleError as error:
                raise RuleError(f"operator {self.name}: {error}") from None
            if not self.variadic and count != len(self.input_names):
                raise RuleError(
                    f"operator {self.name}: its rule {rule!r} has {count} inputs, its kernel takes "
                    f"{', '.join(self.input_names) or 'none'}."
                )
        self._dtype = dtype
        self.flops: Callable[..., float] | None = None
        self.traffic: Callable[..., float] | None = None
        self.workspace: Callable[..., float] | None = None
        self.product: Callable[..., tuple[int, int, int, int]] | None = None
        self.view = False
        self.cases: list[Case] = []
        self.reasons: dict[str, str] = {}
        self._gradient: Callable | None = None
        self._localize: Callable[[Attributes, tuple[Shard, ...], tuple[Shard, ...]], Attributes] | None = None
        self._reads: Callable[[Attributes, tuple[Shard, ...], tuple[Shard, ...]], tuple[Shard, ...]] | None = None

    # -- definition --------------------------------------------------------------------------------------------------

    def gradient(self, function: Callable) -> Callable:
        """Decorator: `function(grad, *inputs, **attributes)` returns the inputs' gradients (None where there is none).

        With several outputs `grad` is a tuple (None where unused). A parameter named `out` receives the output(s).
        The function is written in operators, so it builds graph nodes.
        """
        self._gradient = function
        return function

    def localize(self, function: Callable) -> Callable:
        """Decorator: `function(attributes, input_shards, output_shards)` returns the attributes for one rank's shards.

        Needed where an attribute speaks of global positions or sizes (a target shape, an offset into a vocabulary).
        """
        self._localize = function
        return function

    def reads(self, function: Callable) -> Callable:
        """Decorator: `function(attributes, input_shards, output_shards)` returns the boxes of the inputs that one rank
        reads to make its shards of the outputs; it fetches from its neighbours what it does not hold.

        Needed where a rule lets dimensions follow others (`h~p`). Boxes may differ from the shards in dimensions only
        that a mesh axis splits. `localize` then gets these boxes as input shards. A kernel that reads what it holds
        needs no communication: give the shard itself where it contains the box.
        """
        self._reads = function
        return function

    def case(self, *types: str, ranges: Mapping[str, tuple[float, float]] | None = None, **attributes: Any) -> None:
        """Add an example call, such as `matmul.case("f32[4,6]", "f32[6,5]")`."""
        parsed = tuple(parse_type(text) for text in types)
        self.infer(parsed, attributes)
        for name in ranges or ():
            self._index(name, self.input_names, "ranges")
        self.cases.append(Case(parsed, attributes, dict(ranges or {})))

    @property
    def differentiable(self) -> bool:
        """Whether it has a gradient."""
        return self._gradient is not None

    @property
    def localizes(self) -> bool:
        """Whether its attributes differ from rank to rank."""
        return self._localize is not None

    @property
    def borders(self) -> bool:
        """Whether it may read more of its inputs than a rank's shards."""
        return self._reads is not None

    # -- what follows for a node -------------------------------------------------------------------------------------

    def parse(self, text: str) -> Rule:
        """A rule of this operator; raises `RuleError` if it is none, or has not as many outputs as there are names."""
        if not isinstance(text, str):
            raise RuleError(f"its rule is {text!r}; write a text: inputs -> outputs, such as 'm k+, k+ n -> m n'.")
        rule = parse_rule(text)
        if not self._many and len(rule.outputs) != len(self.output_names):
            raise RuleError(
                f"its rule {text!r} has {len(rule.outputs)} outputs, but their names are "
                f"{', '.join(self.output_names) or 'none'} (outputs=)."
            )
        return rule

    def bind(self, types: Sequence[TensorType], attributes: Mapping[str, Any]) -> BoundRule:
        """The rule with the sizes of one node; raises `RuleError` naming the operator."""
        frozen = _freeze(attributes)
        try:
            hash(frozen)
        except TypeError:
            raise GraphError(
                f"operator {self.name}: attributes are plain values (numbers, strings, tuples of these), "
                f"got {dict(attributes)!r}."
            ) from None
        return _bind(self, tuple(types), frozen)

    def infer(self, types: Sequence[TensorType], attributes: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Types of the outputs."""
        shapes = self.bind(types, attributes).output_shapes()
        dtypes: Any = self._dtype
        if callable(dtypes):
            try:
                dtypes = dtypes(*types, **self.complete(attributes))
            except RuleError as error:
                raise RuleError(f"operator {self.name}: {error}") from None
            except _MISFITS as error:
                raise _misfit(self, types, attributes, error) from error
        if dtypes is None:
            if not types:
                raise RuleError(f"operator {self.name} has no inputs, so its definition must give dtype=.")
            dtypes = types[0].dtype
        if not isinstance(dtypes, (tuple, list)):
            dtypes = (dtypes,) * len(shapes)
        if len(dtypes) != len(shapes):
            raise RuleError(
                f"operator {self.name} has {len(shapes)} outputs, its dtype= gives {len(dtypes)} element types."
            )
        return tuple(TensorType(shape, dtype) for shape, dtype in zip(shapes, dtypes))

    def complete(self, attributes: Mapping[str, Any]) -> Attributes:
        """The attributes with their defaults; unknown or missing ones raise `GraphError`."""
        unknown = set(attributes) - set(self.defaults)
        if unknown:
            raise GraphError(
                f"operator {self.name} has no attribute {', '.join(sorted(unknown))}; "
                f"it has {', '.join(self.defaults) or 'none'}."
            )
        complete = {**self.defaults, **attributes}
        missing = [name for name, value in complete.items() if value is inspect.Parameter.empty]
        if missing:
            raise GraphError(f"operator {self.name} needs the attribute {', '.join(missing)}.")
        return complete

    def local_attributes(
        self, attributes: Mapping[str, Any], inputs: tuple[Shard, ...], outputs: tuple[Shard, ...]
    ) -> Attributes:
        """The attributes with which the kernel runs on one rank's shards."""
        complete = self.complete(attributes)
        return complete if self._localize is None else self._localize(complete, inputs, outputs)

    def read_boxes(
        self, attributes: Mapping[str, Any], inputs: tuple[Shard, ...], outputs: tuple[Shard, ...]
    ) -> tuple[Shard, ...]:
        """The boxes of the inputs that the kernel is given on one rank: its shards, unless it reads more."""
        return inputs if self._reads is None else self._reads(self.complete(attributes), inputs, outputs)

    def workspace_bytes(
        self,
        rule: BoundRule,
        types: Sequence[TensorType],
        outputs: Sequence[TensorType],
        attributes: Mapping[str, Any],
        signature: Signature,
        mesh_shape: Sequence[int],
    ) -> int:
        """Bytes that the kernel holds while it runs, besides its operands, on the rank with the largest shards.

        What is read beyond a shard is fetched and put together with it, in arrays that count.
        """
        kernel = 0
        if self.workspace is not None:
            sizes = self._sizes(rule, types, outputs, attributes, signature, mesh_shape)
            kernel = math.ceil(_named_call(self.workspace, {**sizes, "itemsize": SIZES[outputs[0].dtype]}))
        if self._reads is None:
            return kernel
        held, read = [], []
        shape = rule.border_shape(signature, mesh_shape)
        for place in product(*map(range, shape)):
            mine, made = rule.shards(signature, mesh_shape, place)
            held.append(mine)
            read.append(self.read_boxes(attributes, mine, made))
        item_bytes = [SIZES[type.dtype] for type in types]
        return fetched_bytes(signature.inputs, Mesh(shape), held, read, item_bytes, kernel)

    def product_sizes(
        self,
        rule: BoundRule,
        types: Sequence[TensorType],
        outputs: Sequence[TensorType],
        attributes: Mapping[str, Any],
        signature: Signature,
        mesh_shape: Sequence[int],
    ) -> tuple[int, int, int, int]:
        """(batch, m, n, k) of the operator's `product` on the rank with the largest shards."""
        assert self.product is not None
        return _named_call(self.product, self._sizes(rule, types, outputs, attributes, signature, mesh_shape))

    def _sizes(
        self,
        rule: BoundRule,
        types: Sequence[TensorType],
        outputs: Sequence[TensorType],
        attributes: Mapping[str, Any],
        signature: Signature,
        mesh_shape: Sequence[int],
    ) -> Attributes:
        """What `flops`, `traffic` and `workspace` may name."""
        local = _local_elements(signature.inputs, types, mesh_shape)
        made = _local_elements(signature.outputs, outputs, mesh_shape)
        counts = {"elements": max((*local, *made)), "elements_out": sum(made)}
        return {**counts, **self.complete(attributes), **rule.local_sizes(signature, mesh_shape)}

    def work(
        self,
        rule: BoundRule,
        types: Sequence[TensorType],
        outputs: Sequence[TensorType],
        attributes: Mapping[str, Any],
        signature: Signature,
        mesh_shape: Sequence[int],
    ) -> tuple[float, float]:
        """FLOP, and bytes read and written, by the rank with the largest shards under a signature."""
        local = _local_elements(signature.inputs, types, mesh_shape)
        made = _local_elements(signature.outputs, outputs, mesh_shape)
        values: Attributes | None = None
        if self.flops is not None or self.traffic is not None:
            values = self._sizes(rule, types, outputs, attributes, signature, mesh_shape)
        flops = float(max(made, default=0)) if self.flops is None else float(_named_call(self.flops, values or {}))
        if self.traffic is None:
            moved: float = sum(n * SIZES[t.dtype] for n, t in zip((*local, *made), (*types, *outputs)))
        else:
            moved = _named_call(self.traffic, {**(values or {}), "itemsize": SIZES[outputs[0].dtype]})
        return flops, float(moved)

    def gradients(self, grads: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], attributes: Attributes):
        """Gradients of the inputs from those of the outputs, one per input (None where there is none)."""
        if self._gradient is None:
            raise GraphError(
                f"operator {self.name} has no gradient; detach its inputs, or define one with @{self.name}.gradient."
            )
        grad: Any = tuple(grads) if self.several else grads[0]
        extra = dict(self.complete(attributes))
        parameters = inspect.signature(self._gradient).parameters
        if "out" in parameters:
            extra["out"] = tuple(outputs) if self.several else outputs[0]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            extra = {name: value for name, value in extra.items() if name in parameters}
        result = self._gradient(grad, *inputs, **extra)
        result = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if len(result) != len(inputs):
            raise GraphError(
                f"the gradient of operator {self.name} gives {len(result)} values for {len(inputs)} inputs."
            )
        return result

    # -- call --------------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **attributes: Any) -> Any:
        """Apply to symbols (adds a node) or to arrays (runs the kernel with the arrays' own module)."""
        positional = len(self.input_names)
        if not self.variadic and len(inputs) > positional:
            further = inputs[positional:]  # further positional arguments are attributes, in order
            names = list(self.defaults)[: len(further)]
            if len(further) > len(names) or attributes.keys() & set(names):
                raise GraphError(
                    f"operator {self.name} takes {positional} tensors ({', '.join(self.input_names)}) and the "
                    f"attributes ({', '.join(self.defaults)}), each once; got {len(inputs)} positional arguments"
                    f"{' and ' + ', '.join(attributes) if attributes else ''}."
                )
            attributes = {**dict(zip(names, further)), **attributes}
            inputs = inputs[:positional]
        if not self.variadic and len(inputs) != positional:
            raise GraphError(
                f"operator {self.name} takes {positional} tensors ({', '.join(self.input_names)}), got {len(inputs)}."
            )
        complete = self.complete(attributes)
        for item in inputs:
            apply = getattr(item, "__sbp_apply__", None)
            if apply is not None:
                return apply(self, inputs, complete)
        current = CURRENT.get()
        if not inputs and current is not None:
            return current.apply(self, inputs, complete)
        return self.kernel(array_module(inputs), *inputs, **complete)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def passing_for(
        self, types: Sequence[TensorType], outputs: int = 1, attributes: Mapping[str, Any] | None = None
    ) -> tuple[Passing, ...]:
        """The Partial inputs that pass, for a call with inputs of these types and a number of outputs."""
        linear, monotone, antitone = (
            source(*types, **(attributes or {})) if callable(source) else source for source in self._passing
        )
        kinds = [(linear, "sum", "sum"), (monotone, "max", "max"), (monotone, "min", "min")]
        kinds += [(antitone, "max", "min"), (antitone, "min", "max"), *self._passes]
        found: dict[Passing, None] = {}
        for text, before, after in kinds:
            for inputs, reached in self._groups(text, len(types), outputs):
                # There is no sum of truth values that their own type holds.
                if before != "sum" or all(types[index].dtype != "bool" for index in inputs):
                    found[Passing(inputs, reached, before, after)] = None
        return tuple(found)

    def _groups(self, text: str, count: int, outputs: int) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Groups of inputs that are Partial together, and the outputs they reach: `"all"`, `"each"`, or input names,
        several of these separated by `|`, each optionally with `-> names of outputs`."""
        if not isinstance(text, str):
            raise RuleError(f"operator {self.name}: {text!r} names no inputs; write a text such as 'all' or 'x | y'.")
        every = frozenset(range(max(outputs, len(self.output_names))))
        for part in text.split("|") if text else ():
            left, arrow, right = part.partition("->")
            reached = (
                frozenset(self._index(name, self.output_names, part) for name in right.split()) if arrow else every
            )
            names = left.split()
            if not names:
                raise RuleError(f"operator {self.name}: {text!r} has a group without inputs.")
            if names == ["all"]:
                yield frozenset(range(count)), reached
            elif names == ["each"]:
                for index in range(count):
                    yield frozenset({index}), reached
            else:
                indices: list[int] = []
                for name in names:
                    index = self._index(name, self.input_names, part)
                    last = self.variadic and index == len(self.input_names) - 1
                    indices.extend(range(index, count) if last else (index,))
                yield frozenset(indices), reached

    def _index(self, name: str, names: tuple[str, ...], part: str) -> int:
        if name not in names:
            raise RuleError(
                f"operator {self.name}: {part.strip()!r} names {name!r}, which is none of {', '.join(names)}."
            )
        return names.index(name)


def parse_type(text: str) -> TensorType:
    """A type from its spelling, such as `f32[4,6]`."""
    match = re.fullmatch(r"\s*(\w+)\[([\d\s,]*)\]\s*", text) if isinstance(text, str) else None
    if match is None:
        raise GraphError(f"{text!r} is not a tensor type; write it as f32[4,6].")
    return TensorType(tuple(int(size) for size in match[2].split(",") if size.strip()), match[1])


def _local_elements(layouts: Sequence[Layout], types: Sequence[TensorType], mesh_shape: Sequence[int]) -> list[int]:
    """Elements of each tensor on the rank with the largest shards."""
    return [math.prod(layout.local_shape(t.shape, mesh_shape)) for layout, t in zip(layouts, types)]


def _named_call(function: Callable, values: Mapping[str, Any]) -> Any:
    """Call a function with the `values` that its parameters name (all with `**`); an absent group has product 1."""
    parameters = inspect.signature(function).parameters
    named = {name: values.get(name, 1) for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    return function(**(named if len(named) == len(parameters) else {**values, **named}))


def array_module(inputs: Sequence[Any]) -> Any:
    """The module whose functions take these arrays: CuPy if one of them is its own, else NumPy."""
    for item in inputs:
        if type(item).__module__.partition(".")[0] == "cupy":
            import cupy

            return cupy
    import numpy

    return numpy


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    return value


@lru_cache(maxsize=1 << 14)
def _bind(op: Operator, types: tuple[TensorType, ...], attributes: tuple) -> BoundRule:
    complete = op.complete(dict(attributes))
    shapes = [t.shape for t in types]
    try:
        source: Any = op.rule
        if callable(source):
            source = source(*shapes, **complete)
        text, sizes = source if isinstance(source, tuple) else (source, {})
        rule = op.parse(text)
        sizes = {name: whole(size) for name, size in sizes.items()}
        return bind(rule, shapes, sizes, op.passing_for(types, len(rule.outputs), complete))
    except RuleError as error:
        raise RuleError(f"operator {op.name}({', '.join(map(str, types))}): {error}") from None
    except _MISFITS as error:
        raise _misfit(op, types, dict(attributes), error) from error


_MISFITS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What functions of a definition raise when they are given attributes of a kind that they were not written for."""


def _misfit(op: Operator, types: Sequence[TensorType], attributes: Mapping[str, Any], error: Exception) -> RuleError:
    given = ", ".join(f"{name}={value!r}" for name, value in attributes.items()) or "no attributes"
    return RuleError(
        f"operator {op.name}({', '.join(map(str, types))}) with {given}: its definition cannot take these "
        f"({type(error).__name__}: {error})"
    )


class Registry:
    """Operators by name."""

    def __init__(self) -> None:
        self._operators: dict[str, Operator] = {}

    def add(self, op: Operator) -> None:
        """Register an operator; a second one of the same name is an error unless it is the same source re-run."""
        known = self._operators.get(op.name)
        if known is not None and known.kernel.__module__ != op.kernel.__module__:
            raise RuleError(
                f"operator {op.name!r} is already defined in {known.kernel.__module__}; choose another name."
            )
        self._operators[op.name] = op

    def __getitem__(self, name: str) -> Operator:
        try:
            return self._operators[name]
        except KeyError:
            from difflib import get_close_matches

            near = get_close_matches(name, self._operators)
            hint = f" Did you mean {near[0]}?" if near else " Import the module that defines it first."
            raise GraphError(f"unknown operator {name!r}.{hint}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._operators

    def __iter__(self):
        return iter(sorted(self._operators))

    def __len__(self) -> int:
        return len(self._operators)


REGISTRY = Registry()
"""All operators; the one piece of module-level state, filled as operator modules are imported."""


def operator(rule: RuleSource, **options: Any) -> Callable[[Callable], Operator]:
    """Decorator that makes an operator of a kernel function and registers it.

    Parameters
    ----------
    rule
        A rule (see `sbp.rule`), or a function of the input shapes and attributes that returns one, or (rule, sizes)
        where `sizes` gives dimensions that no input has.
    linear
        Inputs in which it is linear, so that P(sum) passes: "all" (all together), "each" (each alone, the others B),
        or groups by name such as "x y | w", optionally with the outputs reached, "v -> out"; or a function of the
        input types and attributes that returns such a text.
    monotone, antitone
        The same for P(max) and P(min): non-decreasing passes them, non-increasing exchanges them.
    passes
        What these do not say, as (group, reduction before, reduction after), such as ("all", "max", "max").
    outputs
        Names of the outputs, default one, "out"; "*out" if the attributes say how many there are.
    dtype
        Element type of the outputs (a name, or a function of input types and attributes); default the first input's.
    name
        Default the kernel's name.
    """

    def register(kernel: Callable) -> Operator:
        unknown = options.keys() - inspect.signature(Operator).parameters.keys()
        if unknown:
            raise RuleError(
                f"operator {getattr(kernel, '__name__', kernel)} has no option {', '.join(sorted(unknown))}; there are "
                f"{', '.join(list(inspect.signature(Operator).parameters)[2:])}."
            )
        op = Operator(kernel, rule, **options)
        REGISTRY.add(op)
        return op

    return register
