"""What torch.export says when it cannot trace a module, in one line: where in the model, and what to change."""

from __future__ import annotations

import re

_ADVICE = (
    (
        r"higher order operator|torch\.(cond|while_loop|scan|map)\b",
        "it holds programs of its own (torch.cond, a loop), which a plan cannot. Write both branches out and choose "
        "with torch.where.",
    ),
    (
        r"data-dependent|GuardOnDataDependent|DataDependent|_local_scalar_dense|\.item\(\)|unbacked|Eq\(u\d+",
        "its Python code depends on the values of a tensor, which a plan cannot: an `if`, a loop, `.item()`, "
        "`.tolist()` or a shape made of them. Write it with torch.where, take the number as a Python "
        "argument of the constructor, or leave the branch out in training.",
    ),
    (
        r"nonzero|masked_select|boolean mask|unique",
        "the shape of a tensor depends on the data (indexing by a mask, nonzero, unique). Write it with torch.where, "
        "or multiply by the mask.",
    ),
    (
        r"Constraints violated|specialized|dynamic.*dim|Dim\(",
        "it cannot take every batch size: its code fixes the size. Leave dynamic_batch out and give example_inputs "
        "of the batch size that is planned.",
    ),
    (
        r"expected .*dtype|same dtype|must have the same dtype|to have the same dtype",
        "its operations meet tensors of different element types. With precision=... parameters and inputs are of the "
        "computing type; leave precision out to import the model as it is.",
    ),
    (
        r"device",
        "its tensors are on different devices. Put the model and what it creates in forward on one device "
        "(torch.zeros(..., device=x.device)).",
    ),
)


def explained(name: str, error: BaseException) -> str:
    """What torch.export says, in one line, where in the model, and what to change."""
    text = str(error)
    whole = f"{type(error).__name__}: {text}"
    place = _place(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    message = f"{name} cannot be traced by torch.export{f' at {place}' if place else ''}: {first.rstrip('.')}."
    for pattern, advice in _ADVICE:
        if re.search(pattern, whole):
            return f"{message} This is because {advice}"
    return f"{message} Run the model on the example inputs first; torch.export(model, ...) gives the whole message."


def _place(error: BaseException) -> str:
    """The last line of the model's own code on the way to the error."""
    frames: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not re.search(r"/torch/|sbp/frontend/|<.*>|/contextlib\.py|/functools\.py", file):
            frames.append(f"{file}:{trace.tb_lineno}")
        trace = trace.tb_next
    found = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    own = [f"{file}:{line}" for file, line in found if not re.search(r"/torch/|sbp/frontend/", file)]
    return own[-1] if own else frames[-1] if frames else ""
