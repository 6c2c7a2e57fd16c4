"""What the farm works out before it calls a board, and what it reads first of an answer."""

from __future__ import annotations

import anyio
import pytest

from device_agent import protocol
from device_agent.protocol import (
    EnergySpec,
    Engine,
    Limits,
    MeasureSpec,
    OperatingPoint,
    PinReport,
    PinStatus,
    PowerSpec,
    PowerTrace,
    RunSpec,
    StartConditions,
)
from farm.errors import InvalidReplyError, UnavailableError
from farm.measure.answers import require_own_protocol
from farm.measure.session import BoardSession, plan_deadline_s


def test_the_farm_waits_longer_than_the_board() -> None:
    """The board's own deadline gives an outcome, the farm's only a lost board: the farm's comes later. A hundred
    megabytes over a slow link are no reason to give a board up.
    """
    assert plan_deadline_s(MeasureSpec((), limits=Limits(timeout_s=3.0)), 0) > 3.0
    spec = MeasureSpec(())
    assert plan_deadline_s(spec, 100 << 20) - plan_deadline_s(spec, 0) > 10


@pytest.mark.parametrize(
    ("extra", "more_s"),
    [
        ({"start": StartConditions(max_load=0.1, deadline_s=60.0)}, 60.0),
        ({"energy": EnergySpec(limit_s=10.0, idle_s=2.0)}, 12.0),
        ({"energy": EnergySpec(limit_s=10.0, idle_s=0.0), "start": StartConditions(deadline_s=5.0)}, 15.0),
    ],
)
def test_waiting_for_the_board_and_energy_are_allowed_for(extra: dict[str, object], more_s: float) -> None:
    """Start conditions and energy windows take time that the kernel's own limit does not cover."""
    for kind, first in ((MeasureSpec, ()), (RunSpec, Engine.KERNEL)):
        without, with_it = (plan_deadline_s(kind(first, **more), 0) for more in ({}, extra))  # type: ignore[arg-type]
        assert with_it - without >= more_s


class Answering(BoardSession):
    def __init__(self, answer: str) -> None:
        self.key = "nano/7"
        self._simulated = None
        self.answer = answer

    async def _call(self, function: str, deadline_s: float, *arguments: str | bytes) -> str:
        return self.answer


def test_a_description_of_another_version_is_not_believed() -> None:
    """An agent of another version says things that this one does not know: both numbers are named, before the rest. The
    right version with a description that lacks half is nonsense, and the board suspect.
    """
    other = protocol.PROTOCOL_VERSION + 1
    session = Answering(f'{{"protocol_version": {other}, "colour": "blue"}}')
    with pytest.raises(UnavailableError, match=rf"nano/7 speaks protocol {other}, this farm speaks {other - 1}"):
        anyio.run(session._describe)
    with pytest.raises(InvalidReplyError, match="nano/7: Description lacks"):
        anyio.run(Answering(f'{{"protocol_version": {protocol.PROTOCOL_VERSION}}}')._describe)


def test_reports_and_traces_are_read() -> None:
    """What a board answers to pin, unpin and power comes back as messages; what is none is an error."""
    report = PinReport(PinStatus.REFUSED, "1 Hz is not in the table")
    assert anyio.run(Answering(report.to_json()).pin, OperatingPoint(gpu_freq_hz=1)) == report
    assert anyio.run(Answering(report.to_json()).unpin) == report
    trace = PowerTrace(None, board="7")
    assert anyio.run(Answering(trace.to_json()).power, PowerSpec(0.5)) == trace
    with pytest.raises(InvalidReplyError, match="invalid reply from the agent on nano/7"):
        anyio.run(Answering("{}").unpin)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}"])
def test_what_names_no_version_is_refused(text: str) -> None:
    """A description without a version is no description."""
    with pytest.raises(protocol.ProtocolError, match="protocol version"):
        require_own_protocol("nano/7", text)


@pytest.mark.parametrize(
    ("difference", "side"), [(1, "update tvm-farm here"), (-1, "update device-agent on the board")]
)
def test_another_version_says_which_side_to_update(difference: int, side: str) -> None:
    """The older one."""
    version = protocol.PROTOCOL_VERSION + difference
    with pytest.raises(UnavailableError, match=side):
        require_own_protocol("nano/7", f'{{"protocol_version": {version}}}')
