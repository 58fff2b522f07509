"""Modules: a tree of parameter specifications and a `forward` that is run on symbols. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sbp.dtype import dtype_named
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.operator import TensorType
from sbp.trace import GraphBuilder, Symbol, current_builder


@dataclass(frozen=True, eq=False)
class Parameter:
    """State of a module: its type and how it starts. `kind` is parameter (trained) or buffer (updated by the module).

    Two modules that hold the same object share it: one state value, whose gradients add up.
    """

    shape: tuple[int, ...]
    dtype: str = "f32"
    initial: Initial = field(default_factory=lambda: Initial("normal", (0.0, 0.02)))
    kind: str = "parameter"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "dtype", dtype_named(self.dtype))

    @property
    def type(self) -> TensorType:
        """Shape and element type."""
        return TensorType(self.shape, self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.type.elements

    def __repr__(self) -> str:
        return f"<{self.kind} {self.type}>"


@dataclass(frozen=True)
class _Tracing:
    """The root module's names, while it runs: by the identity of its modules and parameters."""

    builder: GraphBuilder
    modules: dict[int, str]
    parameters: dict[int, str]


_TRACING: ContextVar[_Tracing | None] = ContextVar("the root module whose forward is running", default=None)


class Module:
    """Base of all modules, after `torch.nn.Module`.

    Assign `Parameter`s and `Module`s as attributes in `__init__`, write `forward` in operators. Calling a module
    while a graph is being built (`with GraphBuilder() as builder:`) adds its nodes; inside `forward`,
    `self.weight` is then the parameter's symbol, declared at its first use under its `state_dict` name.
    """

    training: bool

    def __init__(self) -> None:
        object.__setattr__(self, "_parameters", {})
        object.__setattr__(self, "_modules", {})
        object.__setattr__(self, "training", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (Parameter, Module)):
            if "_parameters" not in self.__dict__:
                raise GraphError(f"{type(self).__name__}.{name}: call super().__init__() before assigning parts.")
            self.__dict__.pop(name, None)
            is_parameter = isinstance(value, Parameter)
            (self._modules if is_parameter else self._parameters).pop(name, None)
            (self._parameters if is_parameter else self._modules)[name] = value
        else:
            for table in (self.__dict__.get("_parameters", {}), self.__dict__.get("_modules", {})):
                table.pop(name, None)
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__
        if name in parts.get("_parameters", ()):
            parameter = parts["_parameters"][name]
            return parameter if _TRACING.get() is None else self._symbol(name, parameter)
        if name in parts.get("_modules", ()):
            return parts["_modules"][name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _symbol(self, name: str, parameter: Parameter) -> Symbol:
        tracing = _TRACING.get()
        assert tracing is not None
        full = tracing.parameters.get(id(parameter))
        if full is None:
            raise GraphError(
                f"{type(self).__name__}.{name} is not part of the module being traced; assign it to one of its parts."
            )
        known = tracing.builder.symbols.get(full)
        if known is not None:
            if known.value.type != parameter.type or known.value.kind != parameter.kind:
                raise GraphError(
                    f"value {full!r} is {known.value.type}, but the {parameter.kind} of that name is {parameter.type}."
                )
            return known
        return tracing.builder.source(full, parameter.type, parameter.kind, parameter.initial)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module computes; written in operators."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward.")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        builder = current_builder()
        with self._traced(builder) as path, builder.at(builder.phase, path):
            return self.forward(*inputs, **named)

    @contextmanager
    def _traced(self, builder: GraphBuilder) -> Iterator[str]:
        """Gives this module's path; the outermost call names everything below it."""
        tracing = _TRACING.get()
        if tracing is not None and tracing.builder is builder:
            # A module that is no part of the root (made inside forward) counts to the module that calls it.
            yield tracing.modules.get(id(self), builder.module)
            return
        prefix = builder.module
        modules = {id(module): _join(prefix, name) for name, module in self.named_modules()}
        parameters = {id(parameter): _join(prefix, name) for name, parameter in self._named_state()}
        token = _TRACING.set(_Tracing(builder, modules, parameters))
        try:
            yield prefix
        finally:
            _TRACING.reset(token)

    # -- the tree ----------------------------------------------------------------------------------------------------

    def register_buffer(self, name: str, buffer: Parameter) -> None:
        """Add state that is not trained."""
        setattr(self, name, Parameter(buffer.shape, buffer.dtype, buffer.initial, "buffer"))

    def add_module(self, name: str, module: Module) -> None:
        """Add a part under a name that need not be an identifier."""
        setattr(self, name, module)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The direct parts with their names."""
        yield from self._modules.items()

    def children(self) -> Iterator[Module]:
        """The direct parts."""
        yield from self._modules.values()

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it with their paths, each once, parents first."""
        seen: set[int] = set()

        def walk(path: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                for name, child in module.named_children():
                    yield from walk(_join(path, name), child)

        yield from walk(prefix, self)

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        for _, module in self.named_modules():
            yield module

    def _named_state(self) -> Iterator[tuple[str, Parameter]]:
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, parameter in module._parameters.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _join(path, name), parameter

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Trained state with its `state_dict` names; what is shared appears once, under its first name."""
        return ((name, parameter) for name, parameter in self._named_state() if parameter.kind == "parameter")

    def parameters(self) -> Iterator[Parameter]:
        """Trained state."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Parameter]]:
        """State that is not trained, with its names."""
        return ((name, parameter) for name, parameter in self._named_state() if parameter.kind == "buffer")

    def count_parameters(self) -> int:
        """Number of trained elements."""
        return sum(parameter.elements for parameter in self.parameters())

    def train(self, mode: bool = True) -> Module:
        """Set training mode (dropout drops, batch norm uses the batch) here and below; returns itself."""
        for module in self.modules():
            object.__setattr__(module, "training", bool(mode))
        return self

    def eval(self) -> Module:
        """Set inference mode here and below; returns itself."""
        return self.train(False)

    def example_inputs(self, batch: int, sequence: int | None = None) -> dict[str, tuple[TensorType, Initial]]:
        """What `forward` takes: the type of each input and how random examples of it are drawn."""
        raise GraphError(
            f"{type(self).__name__} does not say what its inputs are; define "
            "example_inputs(self, batch, sequence=None) -> {name: (TensorType, Initial)}."
        )

    def extra_repr(self) -> str:
        """What stands in the parentheses of the printed module."""
        return ", ".join(
            f"{key}={value!r}" for key, value in self.__dict__.items() if not key.startswith("_") and key != "training"
        )

    def __repr__(self) -> str:
        lines = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in self.named_children()]
        if not lines:
            return f"{type(self).__name__}({self.extra_repr()})"
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"


class Sequential(Module):
    """Modules applied one after the other; `Sequential(a, b)` or `Sequential([a, b])`; parts are named 0, 1, ..."""

    def __init__(self, *modules: Module | Iterable[Module]) -> None:
        super().__init__()
        parts: Iterable = modules
        if len(modules) == 1 and not isinstance(modules[0], Module):
            parts = modules[0]
        for index, module in enumerate(parts):
            setattr(self, str(index), module)

    def forward(self, x: Any) -> Any:
        """Apply all parts in order."""
        for module in self.children():
            x = module(x)
        return x

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Module:
        return list(self._modules.values())[index]


class ModuleList(Module):
    """A list of modules whose paths are `name.0`, `name.1`, ...; it is iterated over, not called."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        """Add at the end; returns itself."""
        setattr(self, str(len(self._modules)), module)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Module:
        return list(self._modules.values())[index]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
