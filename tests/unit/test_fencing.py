"""Fences: which lease is the latest of its store, on disk and on the line between a session and the listener."""

from __future__ import annotations

import pathlib
import threading

import pytest

from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim, ProtocolError, fence_key, parse_fence_key
from device_agent.session import fencing
from device_agent.session.fencing import Claimant, ClaimLine, Fences


def test_the_greatest_lease_of_a_store_counts(tmp_path: pathlib.Path) -> None:
    """The refusal names the lease that has been there since, and its owner. A holder that connects anew claims the
    token it had. A small token of another store is its greatest. An agent that starts again refuses what the last
    one refused, also in a folder that was not there before.
    """
    fences = Fences()
    assert fences.raise_to(LeaseClaim("a", 7, "right")).status is ClaimStatus.OK
    report = fences.raise_to(LeaseClaim("a", 6, "left"))
    assert (report.status, report.greatest, report.owner) == (ClaimStatus.REFUSED, 7, "right")
    assert "lease 6 of left is over" in report.message
    assert "right has had the board since" in report.message
    fences = Fences()
    assert [fences.raise_to(LeaseClaim("a", 7)).status for _ in range(2)] == [ClaimStatus.OK] * 2
    fences = Fences()
    fences.raise_to(LeaseClaim("a", 1000))
    assert fences.raise_to(LeaseClaim("b", 1)).status is ClaimStatus.OK
    path = tmp_path / "state" / "fences.json"
    Fences(path).raise_to(LeaseClaim("a", 7, "right", "tuning"))
    assert Fences(path).raise_to(LeaseClaim("a", 6)).status is ClaimStatus.REFUSED
    assert [file.name for file in path.parent.iterdir()] == ["fences.json"]


def test_another_lease_with_the_same_number_is_refused(tmp_path: pathlib.Path) -> None:
    """A store that was put back gives a number twice: the second is refused, also after a restart."""
    path = tmp_path / "fences.json"
    first, second = LeaseClaim("a", 7, "left", nonce="11"), LeaseClaim("a", 7, "right", nonce="22")
    fences = Fences(path)
    assert fences.raise_to(first).status is ClaimStatus.OK
    for each in (fences, Fences(path)):
        report = each.raise_to(second)
        assert (report.status, report.greatest, report.owner) == (ClaimStatus.REFUSED, 7, "left")
        assert "put back" in report.message
        assert each.raise_to(first).status is ClaimStatus.OK


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"store": "a"}]', '{"a": 7}', "null", '[{"store": "a", "token": -1}]', "\udcff"]
)
def test_a_broken_file_counts_as_lost(tmp_path: pathlib.Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """The agent starts without it, says so, and writes a good one at the next lease."""
    path = tmp_path / "fences.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    fences = Fences(path)
    assert fences.find_latest("a") is None
    assert "counts as lost" in caplog.text
    fences.raise_to(LeaseClaim("a", 7))
    assert Fences(path).find_latest("a") == LeaseClaim("a", 7)


def test_a_file_that_cannot_be_written_is_done_without(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent goes on fencing by itself, and says so."""
    path = tmp_path / "file" / "fences.json"
    path.parent.write_text("in the way")
    fences = Fences(path)
    fences.raise_to(LeaseClaim("a", 7))
    assert fences.raise_to(LeaseClaim("a", 6)).status is ClaimStatus.REFUSED
    assert "cannot be written" in caplog.text


def test_the_store_that_was_quiet_longest_is_forgotten(tmp_path: pathlib.Path) -> None:
    """The file does not grow for ever: the sixty-fifth store takes the place of the one whose last lease is oldest."""
    fences = Fences(tmp_path / "fences.json")
    for number in range(fencing.MAX_STORES):
        fences.raise_to(LeaseClaim(f"store-{number}", 1))
    fences.raise_to(LeaseClaim("store-0", 2))
    fences.raise_to(LeaseClaim("another", 1))
    again = Fences(tmp_path / "fences.json")
    assert again.find_latest("store-0") == LeaseClaim("store-0", 2)
    assert again.find_latest("store-1") is None
    assert again.find_latest("store-2") is not None


def answering(line: ClaimLine, fences: Fences, times: int) -> threading.Thread:
    """The listener's part, on a thread."""

    def answer() -> None:
        line.sock.setblocking(True)
        for _ in range(times):
            line.answer(fences)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_session_learns_that_its_lease_is_over() -> None:
    """What a session claimed holds until another client has claimed a later lease."""
    fences = Fences()
    line, theirs = ClaimLine.open()
    claimant = Claimant(theirs)
    assert claimant.find_refusal() == ""  # nothing claimed, no request
    listener = answering(line, fences, 3)
    assert claimant.claim(LeaseClaim("a", 6, "left")).status is ClaimStatus.OK
    assert claimant.find_refusal() == ""
    fences.raise_to(LeaseClaim("a", 7, "right"))
    assert "lease 6 of left is over" in claimant.find_refusal()
    listener.join()
    assert line.claim == LeaseClaim("a", 6, "left")


def test_a_session_without_a_listener_does_not_use_the_board() -> None:
    """Where it is unknown whether a lease holds, it counts as over."""
    line, theirs = ClaimLine.open()
    claimant = Claimant(theirs)
    listener = answering(line, Fences(), 1)
    claimant.claim(LeaseClaim("a", 6))
    listener.join()
    line.close()
    assert "cannot tell" in claimant.find_refusal()
    assert "cannot tell" in claimant.find_refusal()


def test_nonsense_from_a_session_ends_its_line_alone() -> None:
    """Foreign code in a session may write anything; the listener closes the line and remembers nothing."""
    fences = Fences()
    line, theirs = ClaimLine.open()
    theirs.send(b"\xff{")
    line.answer(fences)
    assert line.is_closed
    line.answer(fences)
    assert line.claim is None


def test_a_fence_travels_as_a_key() -> None:
    """What a tracker's client would send as its key carries store, token and an owner without blanks or colons."""
    claim = LeaseClaim("3f2a", 12, "ann@lab pid:7 ü", "tuning")
    key = fence_key(claim)
    assert key == "fence:3f2a:12:ann@lab_pid_7__"
    assert parse_fence_key(key) == LeaseClaim("3f2a", 12, "ann@lab_pid_7__")
    drawn = LeaseClaim("3f2a", 12, "ann", nonce="0a1b")
    assert parse_fence_key(fence_key(drawn)) == drawn


@pytest.mark.parametrize(
    "key", ["fence:", "fence:a", "fence:a:", "fence:a:x:o", "fence:a:0:o", "fence:a:-1:o", "client:a:1:o", "fence::1:o"]
)
def test_what_is_no_fence_is_refused(key: str) -> None:
    """Anything else in the place of a fence is a clear error."""
    with pytest.raises(ProtocolError):
        parse_fence_key(key)


def test_claims_are_checked() -> None:
    """A claim that no store can have made does not get as far as the file."""
    for wrong in ({"store": "", "token": 1}, {"store": "a", "token": 0}, {"store": "a", "token": 2**60}):
        with pytest.raises(ProtocolError):
            LeaseClaim.from_dict(wrong)
    with pytest.raises(ProtocolError):
        ClaimReport.from_json('{"status": "perhaps"}')
