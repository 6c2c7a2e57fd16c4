"""What a run of the golden kernel asks of a board; whether it is right and how fast it is, is judged elsewhere."""

from __future__ import annotations

from typing import Any, cast

from device_agent.protocol import RunSpec
from farm.crew import calibration
from farm.measure.blocking import BlockingSession
from farm.search.build.golden import GoldenKernel


class _Session:
    spec: RunSpec

    def run_model(self, spec: RunSpec, library: bytes, inputs: object) -> tuple[Any, Any]:
        self.spec = spec
        return None, {}


def test_loading_is_not_counted_as_running() -> None:
    """A board's first worker reads TVM from its disk: the kernel's own deadline begins with its first call."""
    session = _Session()
    calibration.run_kernel(cast(BlockingSession, session), GoldenKernel("golden", b""))
    assert session.spec.limits.timeout_s == calibration.RUN_TIMEOUT_S
    assert session.spec.limits.load_timeout_s == calibration.LOAD_TIMEOUT_S
