"""Text that others wrote (boards, candidates, files, users), made fit to be shown: nothing in it is obeyed.

A terminal is told nothing but what we say (`show_controls`), and a Markdown page gets words, no markup (`escaped`).
HTML pages escape what they show (`farm/report/pages.py`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# What a terminal acts on instead of showing it (C0 but for tab and newline, DEL, C1), what turns the order of letters
# around, what else ends a line, and halves of characters, which no terminal can be sent.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MARKUP = re.compile(r"[\\`*\[\]<|]")


def show_controls(text: str) -> str:
    r"""The text with its control characters written out, as `\x1b`; tabs and ends of lines stay."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(_write_out, text.replace("\r\n", "\n"))


def escape_markdown(text: str) -> str:
    """The text as one line of Markdown that shows it and does nothing else."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(show_controls(text).splitlines()))


def escaped(value: T) -> T:
    """A document for a Markdown page: every text in it as `escape_markdown` makes it. Keys stay."""
    return _escape(value)  # type: ignore[no-any-return]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A Markdown table; columns hold numbers and go right, except those in `left`."""
    rule = [":--" if column in left else "--:" for column in range(len(head))]
    lines = [head, rule, *rows]
    # What came escaped already stays as it is.
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines)


def _write_out(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return escape_markdown(value)
    if isinstance(value, Mapping):
        return {key: _escape(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_escape(each) for each in value) if type(value) in (list, tuple) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: _escape(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **changes)
    return value
