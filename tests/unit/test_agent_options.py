"""What the command line makes of what users type."""

from __future__ import annotations

import pytest

from device_agent import options
from device_agent.protocol import EVERY_CLUSTER, OperatingPoint, ProtocolError


def parse(*words: str) -> OperatingPoint:
    return options.read_point(options.make_parser().parse_args(["clocks", "pin", *words]))


def test_frequencies_take_the_units_people_write() -> None:
    """MHz without a unit, kHz as cpufreq, MHz and GHz as data sheets; exact, without a float's error."""
    assert parse("--cpu-freq", "1479").cpu_freq_hz == {EVERY_CLUSTER: 1_479_000_000}
    assert parse("--cpu-freq", "1479000kHz").cpu_freq_hz == {EVERY_CLUSTER: 1_479_000_000}
    assert parse("--cpu-freq", "a57=1.2704GHz", "--cpu-freq", "denver=345.6MHz").cpu_freq_hz == {
        "a57": 1_270_400_000,
        "denver": 345_600_000,
    }
    assert parse("--gpu-freq", "921.6MHz", "--memory-freq", "1.6ghz", "--cores", "0,3-5") == OperatingPoint(
        gpu_freq_hz=921_600_000, memory_freq_hz=1_600_000_000, cores_online=(0, 3, 4, 5)
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--cpu-freq", "fast"),
        ("--cpu-freq", "-5MHz"),
        ("--cpu-freq", "0"),
        ("--cpu-freq", "1479000000"),
        ("--cpu-freq", "1.5Hz"),
        ("--cores", "x"),
        ("--cores", ""),
        ("--for", "0"),
        ("--root", "/a", "--virtual", "jetson-nano"),
    ],
)
def test_nonsense_is_refused_as_wrong_usage(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a line that names what was wrong."""
    with pytest.raises(SystemExit) as end:
        parse("--power-mode", "MAXN", *words)
    assert end.value.code == 2
    assert "error" in capsys.readouterr().err


def test_an_empty_point_is_refused() -> None:
    """Holding nothing is a mistake, not a wish."""
    with pytest.raises(ProtocolError, match="nothing to hold"):
        parse()
