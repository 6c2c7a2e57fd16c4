"""The pinned sets: what they may hold, and that they follow pyproject.toml."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("all.txt", "agent.txt", "docs.txt")
LINE = re.compile(r"[a-z0-9.-]+==[^ ]+( ; [^\\]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")


def pins(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for match in re.finditer(r"(?m)^([a-z0-9.-]+)==([^ ]+)", (ROOT / "requirements" / name).read_text()):
        found.setdefault(match[1], set()).add(match[2])
    return found


@pytest.mark.parametrize("name", FILES)
def test_only_pins_markers_and_hashes(name: str) -> None:
    """A pinned set names no index, no host and no local path: where wheels come from is the user's choice."""
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        assert LINE.fullmatch(line), line


def test_pins_belong_together() -> None:
    """A board and the coordinator run the same versions of what both have. The pair that works is pinned: later tvm-ffi
    releases crash TuneContext. Of NVIDIA there is what makes code for boards' GPUs; the 335 MB NCCL wheel of plain
    xgboost stays out.
    """
    whole = pins("all.txt")
    assert {k: v for k, v in pins("agent.txt").items() if whole.get(k) != v} == {}
    assert pins("all.txt")["apache-tvm"] == {"0.27.0.post1"}
    assert pins("all.txt")["apache-tvm-ffi"] == {"0.1.14.post1"}
    assert "xgboost" not in pins("all.txt")
    assert {name: versions for name, versions in pins("all.txt").items() if name.startswith("nvidia-")} == {
        "nvidia-cuda-nvcc-cu12": {"12.9.86"},
        "nvidia-cuda-nvrtc-cu12": {"12.9.86"},
    }
    assert not [name for name in pins("agent.txt") if name.startswith("nvidia-")]
