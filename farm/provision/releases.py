"""NVIDIA's releases of L4T that are known, and what is said of a board that has another one. Pure.

A release that is not known is used all the same: what it changed is found out by the board's own files, by probes and
by `farm board certify`.
"""

from __future__ import annotations

import re

from farm.inventory.board_types import BoardType

# By line: the newest release known, its JetPack, and the chips it is for. NVIDIA's archive of Jetson Linux; the table
# of jetson-stats (rbonghi/jetson_stats, jtop/core/jetson_variables.py); OE4T/meta-tegra (38.4.0 is JetPack 7.1).
_LINES = {
    "R28": ((2, 0), "JetPack 3", ("t186", "t210")),
    "R32": ((7, 6), "JetPack 4", ("t186", "t194", "t210")),
    "R34": ((1, 1), "JetPack 5", ("t194", "t234")),
    "R35": ((6, 4), "JetPack 5", ("t194", "t234")),
    "R36": ((5, 0), "JetPack 6", ("t234",)),
    "R38": ((4, 0), "JetPack 7", ("t264",)),
    "R39": ((2, 0), "JetPack 7", ("t234", "t264")),
}
# As /etc/nv_tegra_release begins, `# R36 (release), REVISION: 4.7, …`, and as the package nvidia-l4t-core has it,
# `36.4.7-20250918154033`.
_FILE = re.compile(r"#?\s*R(\d{1,3}) \(release\), REVISION: (\d{1,3})(?:\.(\d{1,3}))?")
_PACKAGE = re.compile(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?:[-~+].*)?")


def parse_release(text: str) -> str:
    """`36.4.7` of either form; "" for anything else."""
    found = _FILE.match(text) or _PACKAGE.fullmatch(text.strip())
    return "" if found is None else ".".join(part or "0" for part in found.groups())


def describe_release(release: str) -> str:
    """`L4T 36.4.7 (JetPack 6)` for people; "" for none."""
    if not release:
        return ""
    line = _LINES.get(f"R{release.partition('.')[0]}")
    return f"L4T {release}" + (f" ({line[1]})" if line else "")


def find_doubt(release: str, board_type: BoardType | None) -> str:
    """Why a release may not be what is known of a board type; "" where it is, or nothing is known of either."""
    if not release:
        return ""
    major, *rest = (int(part) for part in release.split("."))
    line, about = _LINES.get(f"R{major}"), describe_release(release)
    check = "it is used all the same; `farm board certify` says what it changed"
    if line is None:
        return f"{about} is of a line that is not known here: {check}"
    newest, _, chips = line
    if board_type is not None and board_type.soc and board_type.soc not in chips:
        return f"{about} is not known to be for a {board_type.name}: {check}"
    if tuple(rest[:2]) > newest:
        return f"{about} is newer than {major}.{newest[0]}.{newest[1]}, the newest known here: {check}"
    if board_type is not None and board_type.releases and f"R{major}" not in board_type.releases:
        known = ", ".join(board_type.releases)
        return f"clocks and sensors of a {board_type.name} are known of {known}, not of {about}: {check}"
    return ""
