"""Render pages from templates (`templates/`) as self-contained HTML and as Markdown; all texts are escaped.

Modules such as `campaign_words.py` and `sweep_page.py` supply plain texts and tables.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jinja2

from farm import folders, foreign
from farm.report.charts import Picture

# Kinds of cells: numbers are right-aligned, names of code have its font.
NUMBER, CODE = "number", "code"
_TEMPLATES = pathlib.Path(__file__).with_name("templates")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell's text, and a smaller note below it."""

    text: str
    note: str = ""
    kind: str = ""


# A text, a text with a note, or more than that.
Content: TypeAlias = str | tuple[str, str] | Cell


@dataclasses.dataclass(frozen=True)
class PageTable:
    """A table with its headings; a heading is aligned as its column's cells."""

    head: Sequence[str]
    lines: Sequence[Sequence[Cell]]


def make_table(head: Sequence[str], rows: Iterable[Sequence[Content]], left: Sequence[int] = (0,)) -> PageTable:
    """Return a table of texts, and of texts with notes; columns hold numbers, except those in `left`."""

    def make_cell(content: Content, column: int) -> Cell:
        kind = "" if column in left else NUMBER
        if isinstance(content, Cell):
            return content
        return Cell(content, kind=kind) if isinstance(content, str) else Cell(*content, kind=kind)

    return PageTable(head, [[make_cell(cell, column) for column, cell in enumerate(row)] for row in rows])


@dataclasses.dataclass(frozen=True)
class Listing:
    """Texts one below the other; `lead` introduces them."""

    entries: Sequence[str]
    lead: str = ""


@dataclasses.dataclass(frozen=True)
class Commands:
    """Commands to type, a line each."""

    commands: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables, lists and commands."""

    title: str
    blocks: Sequence[str | PageTable | Listing | Commands]


@dataclasses.dataclass(frozen=True)
class PageAnswer:
    """A result in a line, with details; of which series of several."""

    lead: str
    text: str = ""
    series: str = ""


@dataclasses.dataclass(frozen=True)
class ReportPage:
    """A report as plain text; `simulated` says which figures are simulated, "" where boards are real."""

    title: str
    subtitle: str
    simulated: str
    answers: Sequence[PageAnswer]
    summary: Sequence[str]
    sections: Sequence[Section]
    footer: str


def write_files(folder: pathlib.Path, texts: Mapping[str, str]) -> None:
    """Write the files of a report into a folder, made if need be; each is whole as soon as it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with folders.new_file(folder / name) as part:
            part.write_text(text, encoding="utf-8")


def write_report(
    folder: pathlib.Path, texts: Mapping[str, tuple[str, str]], pictures: Sequence[Picture]
) -> dict[str, str]:
    """Write a report's `texts`, by kind their names and contents; return the paths of these and of its pictures."""
    write_files(folder, dict(texts.values()))
    paths = {kind: str(folder / name) for kind, (name, _) in texts.items()}
    return paths | {each.name: str(folder / each.file) for each in pictures}


def write_page(
    folder: pathlib.Path,
    stem: str,
    page: ReportPage,
    pictures: Sequence[Picture],
    data: Mapping[str, str],
    beside: Sequence[str] = (),
) -> dict[str, str]:
    """Write a page as HTML and Markdown, and `data` by ending; return the paths by kind, and those of its pictures.

    The page links to all of them, and to the files that lie `beside` it already.
    """
    texts = {"markdown": (f"{stem}.md", write_markdown(page, pictures))}
    texts |= {ending: (f"{stem}.{ending}", text) for ending, text in data.items()}
    files = [*(name for name, _ in texts.values()), *beside]
    return write_report(folder, {"page": (f"{stem}.html", write_html(page, pictures, files)), **texts}, pictures)


def write_html(
    page: ReportPage,
    pictures: Sequence[Picture],
    files: Sequence[str],
    template: str = "page.html",
    filters: Mapping[str, Callable[..., Any]] | None = None,
    **more: object,
) -> str:
    """Return the page as self-contained HTML; `files` lie beside it, `more` is for its template."""
    # As images their names cannot clash with another chart's.
    data = [base64.b64encode(each.svg.encode()).decode() for each in pictures]
    shown = [{"caption": each.caption, "data": text} for each, text in zip(pictures, data, strict=True)]
    values = {"page": page, "pictures": shown, "files": files, "several": False} | more
    return _with_filters(filters or {}).get_template(template).render(values)


def write_markdown(page: ReportPage, pictures: Sequence[Picture]) -> str:
    """Return the page as Markdown, with the charts' files beside it."""
    sections = [
        Section(
            foreign.escape_markdown(each.title),
            # A block of code has no markup and ends with a line of its own.
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
    """Render a template as Markdown; its texts are escaped already. One empty line separates paragraphs."""
    environment = _with_filters(filters or {}, finalize=None)
    text = re.sub(r"[ \t]+$", "", environment.get_template(template).render(values), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _with_filters(filters: Mapping[str, Callable[..., Any]], **options: Any) -> jinja2.Environment:
    environment = _environment().overlay(**options)
    environment.filters = environment.filters | dict(filters)
    return environment


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(disabled_extensions=("md",), default_for_string=True, default=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A clock and its unit stay on one line.
        finalize=lambda value: value.replace(" MHz", "\N{NO-BREAK SPACE}MHz") if type(value) is str else value,
    )
    environment.filters["markdown_table"] = _write_table
    return environment


def _write_table(table: PageTable) -> str:
    """Return a table in Markdown, whose texts are escaped already."""
    rows = [[_write_cell(cell) for cell in line] for line in table.lines]
    left = [at for at, cell in enumerate(table.lines[0]) if cell.kind != NUMBER] if table.lines else ()
    return foreign.table(table.head, rows, left=left)


def _write_cell(cell: Cell) -> str:
    text = f"`{cell.text}`" if cell.kind == CODE and cell.text else cell.text
    return f"{text} ({cell.note})" if cell.note else text
