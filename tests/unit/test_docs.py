"""What pages of the documentation name is there."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_pages_cite_what_is_there_and_offer_what_is_published() -> None:
    """Every test, benchmark and module that docs/fidelity.md cites exists. The farm is in no package index: documents
    and errors name ways that work. Token authentication, which a Ray of our own relies on, came with Ray 2.52.
    """
    page = (ROOT / "docs" / "fidelity.md").read_text()
    cited = set(re.findall(r"`((?:tests|benchmarks|device_agent|inventory|deploy)/[\w./-]+)`", page))
    assert len(cited) > 10
    assert not [path for path in sorted(cited) if not (ROOT / path).exists()]
    texts = [*ROOT.glob("*.md"), *(p for folder in ("docs", "deploy") for p in (ROOT / folder).rglob("*.md"))]
    texts += [p for folder in ("farm", "device_agent") for p in (ROOT / folder).rglob("*.py")]
    assert len(texts) > 100
    offered = re.compile(r"pip install '?\"?tvm-farm")
    assert not [path for path in texts if offered.search(path.read_text())]
    (floor,) = re.findall(r'"ray>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(int(part) for part in floor.split(".")) >= (2, 52)


def test_borders_are_tested_as_security_says() -> None:
    """Every test that docs/security.md names is there, by its function where it gives one."""
    page = (ROOT / "docs" / "security.md").read_text()
    cited, path = [], ""
    for text in re.findall(r"`((?:tests/[\w./-]+)?(?:::\w+)?)`", page):
        file, _, function = text.partition("::")
        path = file or path
        cited.append((path, function))
    assert len(cited) > 30
    for path, function in cited:
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), (path, function)


def test_decisions_that_are_named_are_there() -> None:
    """Each decision that code, tests or documents name has its page, and there are at most 30 pages."""
    pages = {path.name[:4]: path.name for path in (ROOT / "docs" / "adr").glob("0*.md")}
    assert len(pages) <= 30
    texts = [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    texts += [path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*.md")]
    texts += [
        p for folder in ("farm", "device_agent", "deploy", "tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")
    ]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        for number, name in re.findall(r"(?:ADR |adr/|\]\()(0\d{3})(-[\w-]+\.md)?", text):
            assert number in pages, (path, number)
            assert not name or pages[number] == number + name, (path, name)


def test_every_decision_has_a_status() -> None:
    """A page begins with its number and title, then says whether the decision stands."""
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        title, _, status, *_ = path.read_text(encoding="utf-8").split("\n")
        assert title.startswith(f"# {path.name[:4]}: "), path
        assert status.startswith("Accepted, "), path


def test_pages_that_are_linked_are_there() -> None:
    """Each relative link between documents leads to a file, and to a heading where it names one."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(
            r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", path.read_text(encoding="utf-8")
        ):
            page = path.parent / target if target else path
            assert page.exists(), (path, target)
            if anchor and page.suffix == ".md":
                assert anchor in _anchors(page), (path, f"{target}#{anchor}")


def _anchors(page: pathlib.Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
