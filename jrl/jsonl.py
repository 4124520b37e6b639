"""JSON lines that survive a kill: whole lines are appended and flushed, and a resumed run drops those it makes again."""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jrl.errors import UserError


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays as lists, array scalars as numbers, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(value: Any) -> str:
    """One line of ASCII, so that no text in it, not even U+2028 or half a surrogate pair, ends the line or the encoding."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=True)


def read(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The rows of a file, without a last line that a kill has cut short; a file that is not there has none.

    Raises:
      UserError: any other line that is not a JSON object, with its number.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
                if not line.endswith(b"\n"):
                    return
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: not a JSON object ({line[:40]!r}); repair or remove the line")
            yield row


class Appender:
    """Appends rows to a JSONL file.

    Args:
      keep: which rows of an earlier run stay; the others, and a line cut short, are dropped before the first append.
    """

    def __init__(self, path: str | os.PathLike, keep: Callable[[dict[str, Any]], bool]):
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole = path.with_name(path.name + ".part")
            with whole.open("w", encoding="ascii") as file:
                file.writelines(dumps(row) + "\n" for row in read(path) if keep(row))
            os.replace(whole, path)  # at no moment is there no file, or half of one
        self._file = path.open("a", encoding="ascii")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows, and hands them to the operating system before it returns."""
        self._file.write("".join(dumps(row) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
