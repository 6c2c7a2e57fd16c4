"""The golden kernel run on a board that somebody holds: one way for probes, the doctor, certificates and provisioning.

Which kernel it is and what it computes is in `farm.search.build.golden`; what its time says of a board, in
`calibration`.
"""

from __future__ import annotations

from device_agent.protocol import EnergySpec, Engine, Limits, Outcome, RunSpec, Status
from farm.errors import PermanentError
from farm.inventory.board_types import BoardType
from farm.measure.arrays import Arrays
from farm.measure.session import BoardSession
from farm.search.build import golden

# Under FARM_HOME: the kernels that were built.
KERNEL_FOLDER = "cache/golden"
# A few runs show that it computes; a time that is compared with others' takes more of both.
RUNS, WARMUP = 5, 2
# The golden kernel takes milliseconds; a board that needs this long hangs.
RUN_TIMEOUT_S = 30.0
# A board's first worker reads TVM from its disk: beside a busy host, an emulated board took more than 10 s.
LOAD_TIMEOUT_S = 60.0
_MEMORY_BYTES = 256 << 20


def require_kernel(kernels: golden.GoldenKernels, kind: BoardType | None, architecture: str) -> golden.GoldenKernel:
    """The kernel for boards of a type, or of none that is known. Raises DeadlineError, UnavailableError."""
    target = kind.target.to_tvm() if kind is not None and kind.target else None
    return kernels.require(golden.plan_target(target, architecture))


def run_kernel(
    session: BoardSession,
    kernel: golden.GoldenKernel,
    runs: int = RUNS,
    warmup: int = WARMUP,
    energy: EnergySpec | None = None,
) -> tuple[Outcome, Arrays]:
    """Its outcome and outputs, not judged."""
    return session.run_model(plan_run(runs, warmup, energy), kernel.library, golden.make_inputs())


def plan_run(runs: int = RUNS, warmup: int = WARMUP, energy: EnergySpec | None = None) -> RunSpec:
    """What to ask of a board."""
    limits = Limits(timeout_s=RUN_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S, memory_bytes=_MEMORY_BYTES, threads=1)
    return RunSpec(Engine.KERNEL, entry=golden.ENTRY, runs=runs, warmup=warmup, limits=limits, energy=energy)


def require_right(session: BoardSession, kernel: golden.GoldenKernel, energy: EnergySpec | None = None) -> Outcome:
    """A run with the right result. Raises PermanentError, whose message does not name the board."""
    outcome, outputs = run_kernel(session, kernel, energy=energy)
    check(outcome, outputs)
    return outcome


def check(outcome: Outcome, outputs: Arrays) -> None:
    """Raise PermanentError, whose message does not name the board, unless a run has the right result."""
    if outcome.status is not Status.OK:
        raise PermanentError(f"the golden kernel failed: {outcome.status} {outcome.message}")
    if wrong := golden.find_mismatch(outputs):
        raise PermanentError(wrong, "Its memory or processor may be faulty, or its clocks too high.")
