"""Programs that are sent to a board once: what the agent keeps, and what the farm takes to be there."""

from __future__ import annotations

import hashlib
import json
import pathlib

import anyio
import pytest

from device_agent.protocol import ProtocolError
from device_agent.session import session
from device_agent.session.session import Programs
from farm.errors import PermanentError
from farm.measure.session import LEAST_BYTES, UploadCache


def name(program: bytes) -> str:
    return hashlib.sha256(program).hexdigest()


def test_a_program_is_kept_as_it_came(tmp_path: pathlib.Path) -> None:
    """By its own digest, and by no other's. Candidates run as the agent's user, and could write there."""
    kept = Programs(tmp_path / "programs")
    assert kept.keep(name(b"one"), b"one") == [name(b"one")]
    assert kept.take(name(b"one")) == b"one"
    for digest in (name(b"two"), "../../etc/passwd", ""):
        with pytest.raises(ValueError, match="is not the SHA-256"):
            kept.keep(digest, b"one")
        with pytest.raises(ValueError, match="is kept"):
            kept.take(digest)
    kept = Programs(tmp_path)
    kept.keep(name(b"one"), b"one")
    (tmp_path / name(b"one")).write_bytes(b"two")
    with pytest.raises(ValueError, match="changed on the board"):
        kept.take(name(b"one"))


def test_what_was_used_longest_ago_goes_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs and few bytes are kept, but always the one that came."""
    monkeypatch.setattr(session, "MOST", 2)
    monkeypatch.setattr(session, "MOST_BYTES", 10)
    kept = Programs(tmp_path)
    kept.keep(name(b"1"), b"1")
    kept.keep(name(b"2"), b"2")
    kept.take(name(b"1"))
    assert kept.keep(name(b"3"), b"3") == [name(b"1"), name(b"3")]
    assert kept.keep(name(b"123456789"), b"123456789") == [name(b"3"), name(b"123456789")]
    assert kept.keep(name(b"more than ten"), b"more than ten") == [name(b"more than ten")]
    assert [each.name for each in tmp_path.iterdir()] == [name(b"more than ten")]


LARGE, OTHER = b"a" * LEAST_BYTES, b"b" * LEAST_BYTES


def test_large_programs_are_sent_once(tmp_path: pathlib.Path) -> None:
    """Small ones go with every run; one that the board let go of is sent again."""
    sent: list[bytes] = []
    kept = Programs(tmp_path)

    async def keep(digest: str, program: bytes) -> str:
        sent.append(program)
        return json.dumps(kept.keep(digest, program)[-1:])

    there = UploadCache(keep)
    assert anyio.run(there.find, b"small") is None
    assert [anyio.run(there.find, each) for each in (LARGE, LARGE, OTHER, OTHER, LARGE)] == [
        name(each) for each in (LARGE, LARGE, OTHER, OTHER, LARGE)
    ]
    assert sent == [LARGE, OTHER, LARGE]


def test_a_board_without_room_gets_programs_with_every_run() -> None:
    """It is asked once."""
    asked = 0

    async def keep(digest: str, program: bytes) -> str:
        nonlocal asked
        asked += 1
        raise PermanentError("keep_program failed on nano: No space left on device")

    there = UploadCache(keep)
    assert [anyio.run(there.find, LARGE), anyio.run(there.find, LARGE), asked] == [None, None, 1]


@pytest.mark.parametrize("answer", ["", "{}", "[1]", 7, json.dumps(["x"] * 2000)])
def test_a_board_that_says_nonsense_is_doubted(answer: object) -> None:
    """What it has is said as a list of digests, and a short one."""

    async def keep(digest: str, program: bytes) -> object:
        return answer

    with pytest.raises(ProtocolError):
        anyio.run(UploadCache(keep).find, LARGE)
