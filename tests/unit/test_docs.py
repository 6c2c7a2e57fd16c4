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
