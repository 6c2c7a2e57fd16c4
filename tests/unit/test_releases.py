"""Releases of L4T: those that users have are known, and one that is not is used with a word about it."""

from __future__ import annotations

import pytest

from farm.inventory.board_types import require_board_type
from farm.provision.survey import describe_release, find_doubt, parse_release

ORIN, SUPER, THOR, NANO = (
    require_board_type(name)
    for name in ("jetson-orin-nano-8gb", "jetson-orin-nano-super", "jetson-agx-thor", "jetson-nano")
)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64", "36.4.7"),
        ("# R38 (release), REVISION: 2.0, GCID: 41844464, BOARD: generic", "38.2.0"),
        ("# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t210ref", "32.7.1"),
        ("36.5.0-20260115194252", "36.5.0"),
        ("38.4", "38.4.0"),
        ("", ""),
        ("# R36; rm -rf /", ""),
        ("1000.1.1", ""),
    ],
)
def test_a_release_is_read_from_either_place(text: str, release: str) -> None:
    """The file's first line, or the package's version where there is no file; nothing else is one."""
    assert parse_release(text) == release


@pytest.mark.parametrize(
    ("release", "board_type"),
    [("36.4.3", SUPER), ("36.4.7", ORIN), ("36.5.0", SUPER), ("38.2.0", THOR), ("38.4.0", THOR), ("32.7.6", NANO)],
)
def test_what_users_have_is_known(release: str, board_type: object) -> None:
    """JetPack 4, 6.2 and 7 on the boards that they are for: nothing is said."""
    assert find_doubt(release, board_type) == ""  # type: ignore[arg-type]


def test_what_is_not_known_is_used_with_a_warning() -> None:
    """A newer point release, another line, a line for another chip, a line that the type's tables are not of."""
    assert "newer than 36.5.0" in find_doubt("36.6.0", ORIN)
    assert "of a line that is not known" in find_doubt("41.1.0", THOR)
    assert "not known to be for a jetson-nano" in find_doubt("36.4.7", NANO)
    assert "known of R35, R36, not of L4T 39.2.0 (JetPack 7)" in find_doubt("39.2.0", ORIN)
    assert all("used all the same" in find_doubt(text, ORIN) for text in ("36.6.0", "99.0.0", "39.1.0"))
    assert find_doubt("", ORIN) == ""
    assert describe_release("36.4.7") == "L4T 36.4.7 (JetPack 6)"
