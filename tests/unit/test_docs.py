"""What pages of the documentation name is there."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_what_fidelity_rests_on_is_there() -> None:
    """Every test, benchmark and module that docs/fidelity.md cites exists."""
    page = (ROOT / "docs" / "fidelity.md").read_text()
    cited = set(re.findall(r"`((?:tests|benchmarks|device_agent|inventory|deploy)/[\w./-]+)`", page))
    assert len(cited) > 10
    assert not [path for path in sorted(cited) if not (ROOT / path).exists()]


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


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    """The farm is in no package index: documents and errors name ways that work."""
    texts = [*ROOT.glob("*.md"), *(p for folder in ("docs", "deploy") for p in (ROOT / folder).rglob("*.md"))]
    texts += [p for folder in ("farm", "device_agent") for p in (ROOT / folder).rglob("*.py")]
    assert len(texts) > 100
    offered = re.compile(r"pip install '?\"?tvm-farm")
    assert not [path for path in texts if offered.search(path.read_text())]


def test_ray_is_new_enough_to_keep_strangers_out() -> None:
    """Token authentication, which a Ray of our own relies on, came with Ray 2.52."""
    (floor,) = re.findall(r'"ray>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(int(part) for part in floor.split(".")) >= (2, 52)
