"""Generated parts of documents are current, and what documents name exists."""

from __future__ import annotations

import pathlib
import re
import types

import pytest

from device_agent.protocol import Status
from farm.cli import main
from tests import release_scripts

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> types.ModuleType:
    return release_scripts.load("reference")


@pytest.mark.parametrize("page", ["commands", "faults", "folders", "settings"])
def test_generated_parts_are_current(reference: types.ModuleType, page: str) -> None:
    """The page has what the code says; `make generated` writes it again."""
    path = ROOT / "docs" / f"{page}.md"
    assert path in reference.find_pages()
    assert path.read_text(encoding="utf-8") == reference.fill(path.read_text(encoding="utf-8"))


def test_no_other_page_has_generated_parts(reference: types.ModuleType) -> None:
    """The test above covers every page that `make generated` writes."""
    assert [path.stem for path in reference.find_pages()] == ["commands", "faults", "folders", "settings"]


def test_tables_have_every_command_and_status(reference: types.ModuleType) -> None:
    """Each command with an example stands in the table, and on the site with its options. No cell of the table of
    statuses is empty, but for those of `ok`.
    """
    rows, options = reference.list_commands(), reference.list_options()
    for words in main.EXAMPLES:
        assert f"| `farm {words}` |" in rows
        assert f"## farm {words}\n" in options
    assert options.count("```sh\n") == len(main.EXAMPLES)
    rows = [row.split(" | ") for row in reference.list_statuses().splitlines()[2:]]
    assert len(rows) == len(Status)
    assert all(all(cell.strip("| ") for cell in row) for row in rows if "`ok`" not in row[0])


def test_deadlines_have_values_and_modules(reference: types.ModuleType) -> None:
    """The table has the constants that end a wait, each with its value, its module and its reason."""
    rows = reference.list_deadlines().splitlines()
    assert len(rows) > 80
    assert not [row for row in rows if row.endswith("|  |")], "say above these constants what they wait for"
    assert any(row.startswith("| `LEASE_TTL_S` | 60.0 | `farm/store/leases.py` | ") for row in rows)


def test_the_site_has_the_long_parts(reference: types.ModuleType) -> None:
    """Marks of parts that only the site has are replaced by their tables."""
    pages = {
        "docs/commands.md": "## farm tune\n",
        "docs/deadlines.md": "`LEASE_TTL_S`",
        "deploy/prometheus/README.md": "| `tvm_farm_boards` |",
    }
    for page, text in pages.items():
        source = (ROOT / page).read_text(encoding="utf-8")
        assert text not in source
        assert text in reference.fill_for_site(source)


def _find_pages() -> list[pathlib.Path]:
    docs = ROOT / "docs"
    folders = (ROOT, docs, docs / "howto", docs / "adr", docs / "kernels", *(ROOT / "deploy").iterdir())
    return [page for folder in folders for page in folder.glob("*.md") if page.name != "CHANGELOG.md"]


def test_files_that_documents_name_exist() -> None:
    """A path to a module or folder of ours exists; one that begins within a package is the end of a path."""
    tops = ("farm", "device_agent", "deploy", "tests", "inventory", "benchmarks")
    modules = {path.as_posix() for top in tops for path in (ROOT / top).rglob("*.py")}
    missing = []
    for page in _find_pages():
        text = page.read_text(encoding="utf-8")
        for name in re.findall(rf"(?<![\w./-])((?:{'|'.join(tops)})/(?:[\w/-]+\.py\b|[\w/-]*/(?=[`\s])))", text):
            if not (ROOT / name).exists():
                missing.append((page.name, name))
        for name in re.findall(r"`([\w-]+/[\w/-]+\.py)\b", text):
            if not any(path.endswith(f"/{name}") for path in modules):
                missing.append((page.name, name))
    assert not missing


def test_functions_that_architecture_names_are_in_their_modules() -> None:
    """A name before a module in brackets is defined there, as in "`Roster.want` (`farm/campaign/engine/roster.py`)"."""
    text = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    named = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", text)
    assert len(named) > 8
    for name, module in named:
        source = (ROOT / module).read_text(encoding="utf-8")
        for part in name.split("."):
            assert part == "Store" or re.search(rf"(?m)^ *(async def|def|class) {part}\b", source), (name, module)


def _find_examples(text: str) -> list[str]:
    """Find the farm's commands in a page's blocks and between its backquotes."""
    blocks = re.findall(r"(?s)```(?:sh|text)?\n(.*?)```", text) + re.findall(r"(?m)^    +(.*)$", text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text)
    return [found[1] for line in lines if (found := re.match(r"(?:\S*/)?farm ([a-z].*)", line.strip()))]


def test_commands_of_documents_exist(reference: types.ModuleType) -> None:
    """Every command that a page shows is one of the farm's, and so is each of its options."""
    commands = dict(reference.walk_commands())
    wrong, count = [], 0
    for page in _find_pages():
        for example in _find_examples(page.read_text(encoding="utf-8")):
            words = re.sub(r"#.*|[&|;>].*|\[|\]", "", example.partition(" -- ")[0]).split()
            name = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in commands), "")
            known = {
                option
                for each in getattr(commands.get(name), "params", [])
                for option in each.opts + each.secondary_opts
            }
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            count += 1
            if not name or options - known - {"--json", "--help", "--version"}:
                wrong.append((page.name, example, options - known))
    assert not wrong
    assert count > 200
