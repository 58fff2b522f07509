"""Reading a JSON file, and saying why it cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sbp.errors import SbpError


def read_json_file(path: str | Path, what: str, writer: str, error: type[SbpError]) -> Any:
    """The data of a JSON file.

    Parameters
    ----------
    path
        The file.
    what
        What it holds, for messages: `plan`.
    writer
        What writes such files, for messages: `Plan.save`.
    error
        What is raised if it cannot be read, is cut off, or is not JSON.
    """
    import orjson

    if not str(path):
        raise error(f"the path of the {what} file is empty; give the name of a file that {writer} wrote.")
    try:
        return orjson.loads(Path(path).read_bytes())
    except orjson.JSONDecodeError as problem:
        cut = "end of data" in str(problem) or "empty document" in str(problem)
        says = "is not a complete JSON file" if cut else "is not JSON"
        raise error(f"{path} {says} ({problem}); write it again with {writer}.") from None
    except OSError as problem:
        raise error(f"cannot read the {what} file {path}: {problem.strerror or problem}.") from None
    except ValueError as problem:  # a zero byte in the path
        raise error(f"cannot read the {what} file {path!r}: {problem}.") from None
