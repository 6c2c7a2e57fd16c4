"""The manual pages: current, complete, and written as `man` wants them."""

from __future__ import annotations

import pathlib
import re
import types

import pytest

from farm.cli import examples
from tests import release_scripts

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def manual() -> types.ModuleType:
    return release_scripts.load("manual")


def test_pages_are_current(manual: types.ModuleType) -> None:
    """What is checked in is what the commands make; `make generated` writes it again. Dots and apostrophes at the
    beginning, backslashes and hyphens.
    """
    there = {path.name: path.read_text(encoding="utf-8") for path in manual.FOLDER.glob("*.1")}
    assert there == manual.make_pages()
    assert manual._escape(".x") == "\\&.x"
    assert manual._escape("a\\b --c") == "a\\eb \\-\\-c"


def test_every_command_is_there_with_its_example(manual: types.ModuleType) -> None:
    """A command that has an example has a place in a page, and its text is no request of roff's."""
    pages = manual.make_pages()
    for words, example in examples.EXAMPLES.items():
        page = pages[f"farm-{words.split()[0]}.1"]
        assert manual._escape(f"farm {words}") in page.replace("\\fB", "").replace("\\fR", "")
        assert manual._escape(f"farm {example}") in page
    known = re.compile(r"\.(TH|SH|SS|TP|PP|B|BR|I|nf|fi|RS|RE)\b")
    assert not [
        line for page in pages.values() for line in page.splitlines() if line[:1] in ".'" and not known.match(line)
    ]
