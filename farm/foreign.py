"""Sanitise foreign text (from boards, candidates, files, users) for display.

`show_controls` is for terminals, `escaped` for Markdown. HTML pages escape their own text (`farm/report/pages.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Characters that a terminal interprets (C0 except tab and newline, DEL, C1), that reverse the text direction, that end
# a line, and surrogates, which cannot be sent.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MARKUP = re.compile(r"[\\`*\[\]<|]")
# pydantic's messages in the farm's words.
_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r"Input should be a valid integer.*", "it must be a whole number"),
        (r"Input should be a valid (?:number|decimal).*", "it must be a number"),
        (r"Input should be a finite number", "it must be a finite number"),
        (r"Input should be a valid string", "it must be text"),
        (r"Input should be a valid boolean.*", "it must be true or false"),
        (r"Input should be a valid (?:list|tuple|set|array)", "it must be a list"),
        (r"Input should be a (?:valid )?dictionary.*", "it must hold keys and values"),
        (r"Input should be greater than or equal to (\S+)", r"it must be at least \1"),
        (r"Input should be less than or equal to (\S+)", r"it must be at most \1"),
        (r"Input should be greater than (\S+)", r"it must be more than \1"),
        (r"Input should be less than (\S+)", r"it must be less than \1"),
        (r"Input should be ('.*)", r"it must be \1"),
        (r"\w+ should have at least (\d+) items? after validation.*", r"it needs at least \1"),
        (r"\w+ should have at most (\d+) items? after validation.*", r"it may have at most \1"),
        (r"String should have at (least|most) (\d+) characters?", r"it must have at \1 \2 characters"),
        (r"String should match pattern (.*)", r"it must match \1"),
        (r"Input should (.*)", r"it must \1"),
    )
)


def show_controls(text: str) -> str:
    r"""Write control characters as escapes such as `\x1b`; tabs and newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(_write_out, text.replace("\r\n", "\n"))


def find_first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def escape_markdown(text: str) -> str:
    """Escape text as one line of Markdown."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(show_controls(text).splitlines()))


def escaped(value: T) -> T:
    """Escape every text in a document by `escape_markdown`. Keys stay."""
    return _escape(value)  # type: ignore[no-any-return]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A Markdown table; columns are right-aligned, except those in `left`."""
    rule = [":--" if column in left else "--:" for column in range(len(head))]
    lines = [head, rule, *rows]
    # Escaped text stays as it is.
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


def say_plainly(problem: str) -> str:
    """Translate a pydantic message to the farm's words; any other stays."""
    problem = problem.removeprefix("Value error, ")
    for pattern, said in _PLAIN:
        if found := pattern.fullmatch(problem):
            return found.expand(said)
    return problem


def suggest(given: object, known: Iterable[str]) -> str:
    """`Did you mean jetson-nano?`, or nothing without a similar word."""
    near = difflib.get_close_matches(str(given), list(known), n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else ""
