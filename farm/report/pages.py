"""Pages from templates (`templates/`), as HTML that needs nothing but itself and as Markdown; all texts are escaped.

What a page says is gathered by modules such as `campaign_words.py` and `sweep_page.py` as plain texts and `Table`s.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2

from farm import foreign, units

if TYPE_CHECKING:  # loads Matplotlib
    from farm.report.canvas import Picture

# Kinds of cells: numbers go right, names of code look like it.
NUMBER, CODE = "number", "code"
_TEMPLATES = pathlib.Path(__file__).with_name("templates")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell's text, a smaller note below it, and badges as pairs of a word and its kind."""

    text: str
    note: str = ""
    kind: str = ""
    badges: Sequence[tuple[str, str]] = ()


# A text, a text with a note, or more than that.
Content: TypeAlias = str | tuple[str, str] | Cell


@dataclasses.dataclass(frozen=True)
class Line:
    """A table's row; `kind` decides how it looks."""

    cells: Sequence[Cell]
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class PageTable:
    """A table with its headings; a heading stands as its column's cells do."""

    head: Sequence[str]
    lines: Sequence[Line]
    caption: str = ""


def make_table(
    head: Sequence[str],
    rows: Iterable[Sequence[Content]],
    left: Sequence[int] = (0,),
    caption: str = "",
    kinds: Sequence[str] = (),
) -> PageTable:
    """A table of texts, and of texts with notes; columns hold numbers, except those in `left`. `kinds`: its lines'."""
    lines = [
        [
            cell if isinstance(cell, Cell) else Cell(*_pair(cell), kind="" if column in left else NUMBER)
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]
    return PageTable(head, [Line(*pair) for pair in zip(lines, kinds or [""] * len(lines), strict=True)], caption)


def _pair(cell: str | tuple[str, str]) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


@dataclasses.dataclass(frozen=True)
class Listing:
    """Texts one below the other; `lead` says what they are."""

    entries: Sequence[str]
    lead: str = ""


@dataclasses.dataclass(frozen=True)
class Commands:
    """What is typed, a line each."""

    commands: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what stands below it: paragraphs, tables, lists, commands."""

    title: str
    blocks: Sequence[str | PageTable | Listing | Commands]


@dataclasses.dataclass(frozen=True)
class PageAnswer:
    """What came out, in a line, and what there is to say of it; of which series of several."""

    lead: str
    text: str = ""
    series: str = ""


@dataclasses.dataclass(frozen=True)
class ReportPage:
    """What a report says, as plain text; `simulated` says of what figures it is all made, "" where boards are real."""

    title: str
    subtitle: str
    simulated: str
    answers: Sequence[PageAnswer]
    summary: Sequence[str]
    sections: Sequence[Section]
    footer: str


def write_html(
    page: ReportPage, pictures: Sequence[Picture], files: Sequence[str], template: str = "page.html", **more: object
) -> str:
    """The page as HTML which needs nothing but itself; `files` lie beside it, `more` is what its template wants."""
    shown = [{"caption": each.caption, "data": embed(each.svg)} for each in pictures]
    values = {"page": page, "pictures": shown, "files": files, "several": False} | more
    return _environment().get_template(template).render(values)


def write_markdown(page: ReportPage, pictures: Sequence[Picture]) -> str:
    """The page as Markdown, with the pictures' files beside it."""
    sections = [
        Section(
            foreign.escape_markdown(each.title),
            # In a block of code nothing is markup; nothing ends the block but a line of its own.
            [
                Commands([line.replace("\n", " ") for line in block.commands])
                if isinstance(block, Commands)
                else foreign.escaped(block)
                for block in each.blocks
            ],
        )
        for each in page.sections
    ]
    whole = dataclasses.replace(foreign.escaped(dataclasses.replace(page, sections=())), sections=sections)
    return render_markdown("page.md", {"page": whole, "pictures": pictures})


def render_markdown(
    template: str, values: Mapping[str, object], filters: Mapping[str, Callable[[Any], str]] | None = None
) -> str:
    """A page in Markdown from a template, whose texts are escaped already; between paragraphs stands one empty line."""
    environment = _environment().overlay(finalize=None)
    environment.filters = environment.filters | dict(filters or {})
    text = re.sub(r"[ \t]+$", "", environment.get_template(template).render(values), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def embed(svg: str) -> str:
    """A picture as an image's source: as an image its names cannot clash with another picture's."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(disabled_extensions=("md",), default_for_string=True, default=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_keep_together,
    )
    filters: dict[str, Callable[[Any], str]] = {
        "markdown_table": _write_table,
    }
    environment.filters |= filters
    return environment


def format_flop(flop: float) -> str:
    """Three significant digits with the prefix that fits: `21.0 M`."""
    size, unit = next(((size, unit) for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if flop >= size), (1, ""))
    return f"{units.format_number(flop / size) if unit else round(flop)}{unit}"


def _write_table(table: PageTable) -> str:
    """A table in Markdown, whose texts are escaped already."""
    rows = [[_write_cell(cell) for cell in line.cells] for line in table.lines]
    left = [at for at, cell in enumerate(table.lines[0].cells) if cell.kind != NUMBER] if table.lines else ()
    return foreign.table(table.head, rows, left=left)


def _write_cell(cell: Cell) -> str:
    text = f"`{cell.text}`" if cell.kind == CODE and cell.text else cell.text
    return " ".join([text, *([f"({cell.note})"] if cell.note else []), *(word for word, _ in cell.badges)])


def _keep_together(value: object) -> object:
    """A clock stays on one line with its unit."""
    return value.replace(" MHz", "\N{NO-BREAK SPACE}MHz") if type(value) is str else value
