"""Tables and lines of `dynamo top` that fit into a width: columns are left out, never cut. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2


@dataclass(frozen=True)
class Column:
    """A column. `right`: it has numbers. `leaves`: rank in the order in which columns are left out; None: it stays.
    `narrow`: its cells in a short form, which replaces them at that rank; the column is then left out at `then`."""

    header: str
    cells: tuple[str | Text, ...]
    right: bool = False
    leaves: int | None = None
    narrow: tuple[str | Text, ...] | None = None
    then: int | None = None

    @property
    def width(self) -> int:
        """Width of the widest cell, in character cells."""
        return max(map(_width, (self.header, *self.cells)))


def fitted(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns that fit into the width: one after another is narrowed or left out, by its rank."""
    shown = list(columns)
    while _total(shown) > width:
        ranked = [column for column in shown if column.leaves is not None]
        if not ranked:
            break
        index = shown.index(min(ranked, key=lambda column: column.leaves or 0))
        column = shown[index]
        if column.narrow is not None:
            shown[index] = Column(column.header, column.narrow, right=column.right, leaves=column.then)
        else:
            del shown[index]
    return tuple(shown)


def table_of(columns: Sequence[Column], width: int) -> Table:
    """Return a table of the columns that fit into the width."""
    (table,) = tables_of(columns, width, [len(columns[0].cells)])
    return table


def tables_of(columns: Sequence[Column], width: int, sizes: Sequence[int]) -> list[Table]:
    """Return the columns that fit into the width as tables of so many rows each, one below the other: their columns are
    as wide, and the first of them with rows has the headers."""
    shown = fitted(columns, width)
    rows = iter(zip(*(column.cells for column in shown), strict=True))
    tables: list[Table] = []
    is_headed = False
    for size in sizes:
        tables.append(_table(shown, tuple(islice(rows, size)), has_header=size > 0 and not is_headed))
        is_headed = is_headed or size > 0
    return tables


def _table(columns: Sequence[Column], rows: Iterable[tuple[str | Text, ...]], *, has_header: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_header=has_header)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(
            column.header,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=True,
            overflow="ellipsis",
            min_width=column.width,
        )
    for row in rows:
        table.add_row(*row)
    return table


def lines_of(parts: Iterable[str], width: int) -> list[str]:
    """Return the parts on as few lines as they need. A line breaks between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + _GAP + cell_len(part) <= width:
            lines[-1] += f"{' ' * _GAP}{part}"
        else:
            lines.append(part)
    return lines


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + _GAP * max(0, len(columns) - 1)


def _width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)
