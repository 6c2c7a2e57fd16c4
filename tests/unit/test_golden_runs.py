"""What a run of the golden kernel asks of a board; whether it is right and how fast it is, is judged elsewhere."""

from __future__ import annotations

from farm.crew import calibration


def test_loading_is_not_counted_as_running() -> None:
    """A board's first worker reads TVM from its disk: the kernel's own deadline begins with its first call."""
    limits = calibration.plan_run().limits
    assert limits.timeout_s == calibration.RUN_TIMEOUT_S
    assert limits.load_timeout_s == calibration.LOAD_TIMEOUT_S
