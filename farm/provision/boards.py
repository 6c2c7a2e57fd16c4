"""Provision several boards in parallel; a failure of one does not stop the others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from farm.connectivity.tracker import Tracker
from farm.crew import calibration
from farm.crew.leased_board import LeaseKeeper
from farm.errors import TransientError
from farm.inventory.board_types import require_board_type
from farm.measure.blocking import BlockingSession
from farm.processes.machine import name_coordinator
from farm.provision.board import Provisioner, ProvisioningJob, ProvisioningTarget
from farm.provision.plan import BoardReport
from farm.provision.wheels import end_tools
from farm.search.codegen import golden
from farm.store import Store
from farm.values import Health, State

PURPOSE = "provision"
# A running probe ends within this; longer work is not waited for.
WAIT_S = 15.0
_LOOK_S = 0.25

# The agent retries its tracker every second or two; a slow board needs more time to register.
FIND_TIMEOUT_S = 45.0
# An interrupted step ends with the connection, at once; closing it takes up to 2 s.
INTERRUPT_S = 10.0


class StoreHold:
    """Takes leases for a block. Thread-safe."""

    def __init__(self, open_store: Callable[[], Store], owner: str) -> None:
        """`owner` names the person."""
        self._open_store = open_store
        self._owner = owner

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Hold a board. An offline board is worked on without a lease, since no client can use it.

        A board's health does not matter: provisioning is an operator's act. Raises TransientError for a board in use,
        UsageError for an unknown one.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._open_store() as store:
                board = store.boards.require(name)
                try:
                    lease = store.leases.acquire(
                        *(name, self._owner, PURPOSE), allowed=frozenset(Health), through=name_coordinator()
                    )
                    break
                except TransientError:
                    if board.lease is None and board.state == State.OFFLINE:
                        yield
                        return
                    if time.monotonic() > deadline:
                        raise
            time.sleep(_LOOK_S)
        with LeaseKeeper(store.location, lease):
            yield


def prove(tracker: Tracker, kernels: golden.GoldenKernels, target: ProvisioningTarget) -> str:
    """Take the board from a tracker that it can reach, run the golden kernel, and describe the result.

    Raises PermanentError for a failing or wrong kernel, and as `BoardSession`.
    """
    with BlockingSession(tracker, target.key, FIND_TIMEOUT_S) as session:
        about = session.description
        kernel = calibration.require_kernel(kernels, require_board_type(target.options.board_type), about.architecture)
        outcome = calibration.require_right(session, kernel)
    median_s = statistics.median(outcome.latency_s)
    return f"agent {about.agent_version}, protocol {about.protocol_version}, golden kernel {median_s * 1e3:.2f} ms"


def provision_boards(
    targets: Sequence[ProvisioningTarget], job: ProvisioningJob, jobs: int = 8
) -> tuple[BoardReport, ...]:
    """Provision all boards, `jobs` at a time; reports are in the order of `targets`.

    A KeyboardInterrupt ends the work on all boards within seconds; the reports show it, and it is not raised.
    """
    workers = [Provisioner(target, job) for target in targets]
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="provision") as pool:
        futures = [pool.submit(worker.run) for worker in workers]
        try:
            concurrent.futures.wait(futures)
        except KeyboardInterrupt:
            for worker in workers:
                worker.interrupt()
            end_tools()
            concurrent.futures.wait(futures, timeout=INTERRUPT_S)
        return tuple(future.result() for future in futures)
