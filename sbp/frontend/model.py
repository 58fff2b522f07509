"""A PyTorch module with what it takes to plan it, as `auto_parallel` and the command line take it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sbp.errors import FrontendError
from sbp.optim import Optimizer

if TYPE_CHECKING:
    from sbp.frontend.torch import Imported


def is_torch_module(model: object) -> bool:
    """Whether it is a `torch.nn.Module`, found without importing torch."""
    return any(kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module" for kind in type(model).mro())


@dataclass(frozen=True, eq=False)
class TorchModel:
    """A `torch.nn.Module`, example inputs of its `forward`, and its loss (see `sbp.frontend.torch.import_module`)."""

    module: Any
    example_inputs: Any
    loss: Any = None
    targets: Any = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    _imported: dict[Any, Imported] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: Any, example_inputs: Any, loss: Any, targets: Any) -> TorchModel:
        """What `auto_parallel` was given.

        Raises
        ------
        FrontendError
            Example inputs are missing, or given for what is no PyTorch module.
        """
        if isinstance(model, cls) and example_inputs is None and loss is None:
            return model
        if not is_torch_module(model):
            raise FrontendError(
                f"example_inputs, loss and targets belong to a torch.nn.Module, the model is a {type(model).__name__}; "
                "leave them out."
            )
        if example_inputs is None:
            raise FrontendError(
                f"{type(model).__name__} is a torch.nn.Module: give example_inputs=, tensors in the shapes that its "
                "forward takes (on the meta device they take no memory)."
            )
        return cls(model, example_inputs, loss, targets)

    @property
    def name(self) -> str:
        """The module's class."""
        return type(self.module).__name__

    def step(
        self,
        batch: int | None,
        sequence: int | None,
        training: bool,
        optimizer: Optimizer | str | None,
        precision: str | None,
    ) -> Imported:
        """The imported step; another batch than that of the example inputs is imported with a dynamic dimension."""
        from sbp.frontend.exporting import inputs_of
        from sbp.frontend.torch import import_module

        if sequence is not None:
            raise FrontendError(f"{self.name}: the sequence length is that of example_inputs; leave sequence out.")
        tensors = inputs_of(self.module, self.example_inputs, ()).tensors
        given = {tensor.shape[0] for tensor in tensors if tensor.ndim}
        options: dict[str, Any] = {"dynamic_batch": batch is not None and given != {batch}, **self.options}
        key = (batch, training, repr(optimizer), precision)
        if key not in self._imported:  # planned again with recompute, it is the same step
            self._imported.clear()
            self._imported[key] = import_module(
                self.module,
                self.example_inputs,
                loss=self.loss if training else None,
                targets=self.targets if training else (),
                training=training,
                optimizer=optimizer,
                precision=precision,
                batch=batch,
                **options,
            )
        return self._imported[key]
