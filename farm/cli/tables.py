"""Tables on stdout that fit the terminal: the least important columns are left out, and no word is broken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box, markup
from rich.cells import cell_len
from rich.table import Table

from farm.cli import output
from farm.units import NOTHING

# Characters between two columns.
_GAP = 3
# Longer text is broken between words, into lines of at least this width.
_LEAST_TEXT = 16


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    left: Sequence[int] = (0,),
    empty: str = "",
    spare: Sequence[str | int] = (),
) -> None:
    """A table on stdout; `left` columns are text, the others numbers. `empty` is said where there are no rows.

    Long text may be broken between words. Where a terminal is still too narrow, `spare` columns are left out, the first
    one first (by title or number), and then the rightmost ones except the first; what is missing is
    said below.
    """
    if not rows:
        output.stdout.print(empty)
        return
    cells = [[NOTHING if cell is None else str(cell) for cell in row] for row in rows]
    texts = [[column, *(row[index] for row in cells)] for index, column in enumerate(columns)]
    least = [_find_least(each, index in left) for index, each in enumerate(texts)]
    room = output.stdout.width
    shown = fit_columns(columns, least, room, spare)
    room -= sum(least[index] + _GAP for index in shown) - _GAP
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index in shown:
        more = min(max(0, room), max(map(cell_len, texts[index])) - least[index])
        room -= more
        side: Any = "left" if index in left else "right"
        table.add_column(columns[index], justify=side, overflow="fold", width=least[index] + more)
    for row in cells:
        table.add_row(*(markup.escape(row[index]) for index in shown))
    output.print_table(table)
    if missing := [column for index, column in enumerate(columns) if index not in shown]:
        text = f"there is no room for {', '.join(missing)}; `--json` has all"
        output.stdout.print(text, markup=False)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, a line each; on a terminal long values are indented below themselves."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=max(10, *map(len, facts)), no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in facts.items():
        table.add_row(markup.escape(fact), markup.escape(value))
    output.print_table(table)


def fit_columns(columns: Sequence[str], least: Sequence[int], width: int, spare: Sequence[str | int] = ()) -> list[int]:
    """Return the columns, by number, that fit `width` characters where each takes `least`; the first one always."""

    def fits(shown: Iterable[int]) -> bool:
        return sum(least[each] + _GAP for each in shown) - _GAP <= width

    shown, left_out = set(range(len(columns))), []
    for index in _list_spare(columns, spare):
        if fits(shown):
            break
        shown.remove(index)
        left_out.append(index)
    # A narrow column may fit where a wide one that matters more does not.
    for index in reversed(left_out):
        if fits(shown | {index}):
            shown.add(index)
    return sorted(shown)


def _list_spare(columns: Sequence[str], spare: Sequence[str | int]) -> Iterator[int]:
    named = [each if isinstance(each, int) else columns.index(each) for each in spare]
    yield from (index for index in named if index)
    yield from (index for index in range(len(columns) - 1, 0, -1) if index not in named)


def _find_least(texts: Sequence[str], is_text: bool) -> int:
    """Return how narrow a column may be: its longest cell, or the longest word of long text and title."""
    title, *cells = texts
    words = max(cell_len(word) for word in title.split() or [""])
    longest = max(map(cell_len, cells))
    if is_text and longest > _LEAST_TEXT:
        longest = max(_LEAST_TEXT, *(cell_len(word) for text in cells for word in text.split()))
    return max(words, longest)
