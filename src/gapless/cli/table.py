"""Tables of figures that grow row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

_MIN_WIDTH = 7


@dataclass(frozen=True)
class Column:
    """Shows field `key` of each row, divided by `unit` if that is not 1, in Python's `format`."""

    heading: str
    key: str
    format: str
    unit: int = 1
    width: int = _MIN_WIDTH

    def cell(self, row: Mapping[str, Any]) -> str:
        value = row[self.key]
        return self.align(format(value if self.unit == 1 else value / self.unit, self.format))

    def align(self, text: str) -> str:
        return text.rjust(max(self.width, len(self.heading)))


class GrowingTable:
    """Prints its headings at once and each row as it comes."""

    def __init__(self, columns: Iterable[Column], to_stderr: bool = False) -> None:
        self._columns = tuple(columns)
        self._to_stderr = to_stderr
        self._print(column.align(column.heading) for column in self._columns)

    def print_row(self, row: Mapping[str, Any]) -> None:
        self._print(column.cell(row) for column in self._columns)

    def _print(self, cells: Iterable[str]) -> None:
        typer.echo("  " + "  ".join(cells), err=self._to_stderr)
