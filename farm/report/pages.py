"""HTML pages from templates (`templates/`), which need nothing but themselves; texts are escaped wherever they stand.

What a page says is gathered by modules such as `sweep_page.py` as plain texts and `Table`s; here they become HTML.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jinja2

_TEMPLATES = pathlib.Path(__file__).with_name("templates")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell's text, a smaller note below it, and badges as pairs of a word and its kind."""

    text: str
    note: str = ""
    kind: str = ""
    badges: Sequence[tuple[str, str]] = ()


@dataclasses.dataclass(frozen=True)
class Line:
    """A table's row; `kind` decides how it looks."""

    cells: Sequence[Cell]
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with its headings; a heading stands as its column's cells do."""

    head: Sequence[str]
    lines: Sequence[Line]
    caption: str = ""


def render(template: str, **values: object) -> str:
    """A page from a template's file name. Raises jinja2.TemplateError where the template and the values do not fit."""
    return _environment().get_template(template).render(values)


def embed(svg: str) -> str:
    """A picture as an image's source: as an image its names cannot clash with another picture's."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_keep_together,
    )


def _keep_together(value: object) -> object:
    """A clock stays on one line with its unit."""
    return value.replace(" MHz", "\N{NO-BREAK SPACE}MHz") if type(value) is str else value
