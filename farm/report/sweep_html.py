"""The little HTML that a page needs: tables, badges, pictures as data, and a style that also prints. No scripts."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Iterable, Sequence

from farm.report import sweep_style


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


def page(title: str, body: Iterable[str]) -> str:
    """A whole document that needs nothing but itself; `body` is HTML."""
    inside = "\n".join(part for part in body if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{sweep_style.STYLE}</style>\n</head>\n<body>\n<main>\n{inside}\n</main>\n</body>\n</html>\n"
    )


def escape(text: object) -> str:
    """Text that stays text; a clock stays on one line with its unit."""
    return html.escape(str(text)).replace(" MHz", "&nbsp;MHz")


def element(name: str, text: object, kind: str = "") -> str:
    """One element around plain text; "" for no text."""
    attribute = f' class="{escape(kind)}"' if kind else ""
    return f"<{name}{attribute}>{escape(text)}</{name}>" if text else ""


def section(title: str, *parts: str) -> str:
    """A heading and what belongs to it; "" where that is nothing."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def items(texts: Iterable[str]) -> str:
    """A list of plain texts; "" for none."""
    inside = "".join(element("li", text) for text in texts)
    return f"<ul>{inside}</ul>" if inside else ""


def pairs(values: Iterable[tuple[str, object]]) -> str:
    """Names and values; "" for none."""
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values)
    return f"<dl>{inside}</dl>" if inside else ""


def figure(svg: str, caption: str) -> str:
    """A picture inside the page. As an image its names cannot clash with another picture's."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], lines: Sequence[Line], caption: str = "") -> str:
    """A table; a heading stands as its column's cells do."""
    kinds = [cell.kind for cell in lines[0].cells] if lines else [""] * len(head)
    heads = "".join(_open("th", kind) + escape(text) + "</th>" for text, kind in zip(head, kinds, strict=True))
    rows = "\n".join(_open("tr", line.kind) + "".join(map(_cell, line.cells)) + "</tr>" for line in lines)
    label = element("caption", caption)
    return f'<div class="scroll"><table>{label}<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    badges = "".join(element("span", word, f"badge {kind}") for word, kind in cell.badges)
    return _open("td", cell.kind) + escape(cell.text) + element("small", cell.note) + badges + "</td>"


def _open(name: str, kind: str) -> str:
    return f'<{name} class="{escape(kind)}">' if kind else f"<{name}>"
