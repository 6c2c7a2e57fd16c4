"""Text that others wrote is shown, never obeyed: by a terminal, by a Markdown page, by a console's table."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.table import Table

from farm import foreign
from farm.cli import output
from tests import fuzzing

CLEAR, TITLE, COPY = "\x1b[2J", "\x1b]0;owned\x07", "\x9b31m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("conv2d · 3×3, 25 µs\n\tok", "conv2d · 3×3, 25 µs\n\tok"),
        (CLEAR + "x", "\\x1b[2Jx"),
        (TITLE, "\\x1b]0;owned\\x07"),
        (COPY, "\\x9b31m"),
        ("gone\rhere\r\n", "gone\\x0dhere\n"),
        ("a\x08b\x7f", "a\\x08b\\x7f"),
        ("\u202edrowssap", "\\u202edrowssap"),
        ("\ud800", "\\ud800"),
    ],
)
def test_controls_are_written_out(text: str, shown: str) -> None:
    """What a terminal would act on is text; what people write stays as it is."""
    assert foreign.show_controls(text) == shown


def test_a_console_obeys_nobody_but_us() -> None:
    """In a line, a table's cell or a log's message: of escape sequences only our own styles reach the terminal."""
    stream = io.StringIO()
    console = output._Console(file=stream, force_terminal=True, width=100, color_system="standard")
    console.print(f"[bold]{'ours'}[/]", soft_wrap=True)
    table = Table()
    table.add_column("board")
    table.add_row(f"n1 {CLEAR}{TITLE}")
    console.print(table)
    console.print(f"warning: {COPY}{CLEAR}", markup=False)
    text = stream.getvalue()
    assert "\x1b[1mours" in text
    assert "\\x1b[2J" in text
    for sequence in (CLEAR, TITLE, COPY, "\x07", "\x9b"):
        assert sequence not in text


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_a_board_printed_goes_to_a_file_as_it_is_and_to_a_terminal_harmless() -> None:
    """`farm board exec` and `logs` change nothing but for a terminal."""
    data = b"\x1b[2J\xff\n"
    for kind, expected in ((io.TextIOWrapper, data), (Terminal, "\\x1b[2J\ufffd\n".encode())):
        stream = kind(io.BytesIO())
        output.to_stream(stream, data)
        assert stream.buffer.getvalue() == expected  # type: ignore[attr-defined]


def test_markdown_shows_what_was_said() -> None:
    """No link, picture, markup, column or heading comes of it."""
    text = "a | b [x](javascript:y) ![i](http://h) <img src=x> `c` **d**\n# e"
    assert foreign.escape_markdown(text) == (
        r"a \| b \[x\](javascript:y) !\[i\](http://h) \<img src=x> \`c\` \*\*d\*\* # e"
    )
    assert foreign.table(("a", "b"), [(foreign.escape_markdown("x|y"), "p|q")]) == (
        "| a | b |\n| :-- | --: |\n| x\\|y | p\\|q |"
    )
    document: dict[str, Any] = {"name": "<b>", "rows": [("|", 1), {"x": CLEAR}], "n": None}
    assert foreign.escaped(document) == {"name": r"\<b>", "rows": [(r"\|", 1), {"x": "\\\\x1b\\[2J"}], "n": None}


def test_fuzz_nothing_that_a_terminal_acts_on_is_left() -> None:
    """Any bytes that a board prints."""
    for rng in fuzzing.each(300):
        text = rng.randbytes(60).decode(rng.choice(("latin-1", "utf-8", "utf-16-le")), "replace")
        shown = foreign.show_controls(text + chr(rng.randrange(0x3000)))
        shown.encode()
        assert all(char in "\t\n" or not (ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0) for char in shown)
