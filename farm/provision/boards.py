"""Provision several boards at once; one that fails does not stop the others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from farm.connectivity.tracker import Tracker
from farm.crew import calibration
from farm.crew.lease_keeper import LeaseKeeper
from farm.errors import TransientError
from farm.inventory.board_types import require_board_type
from farm.measure.session import BoardSession
from farm.processes.machine import name_coordinator
from farm.provision.board import Provisioner, ProvisioningJob, ProvisioningTarget
from farm.provision.plan import BoardReport
from farm.provision.wheels import end_tools
from farm.search.build import golden
from farm.store import Store
from farm.values import Health, State

PURPOSE = "provision"
# A probe that has the board just now ends within this; work does not, and is not waited for.
WAIT_S = 15.0
_LOOK_S = 0.25


class StoreHold:
    """Takes leases for the length of a block. Thread-safe."""

    def __init__(self, open_store: Callable[[], Store], owner: str) -> None:
        """`owner` says who, so that a person can find them."""
        self._open_store = open_store
        self._owner = owner

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Hold a board. One that is out of reach for the farm is nobody's to use: it is worked on without a lease.

        An operator's word about its health does not matter here: this is an operator too. Raises TransientError where
        somebody uses the board, UsageError where there is none of that name.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._open_store() as store:
                board = store.require_board(name)
                try:
                    lease = store.acquire_lease(
                        *(name, self._owner, PURPOSE), allowed=frozenset(Health), through=name_coordinator()
                    )
                    break
                except TransientError:
                    if board["lease"] is None and board["state"] == State.OFFLINE:
                        yield
                        return
                    if time.monotonic() > deadline:
                        raise
            time.sleep(_LOOK_S)
        with LeaseKeeper(self._open_store, lease):
            yield


# The agent looks for its tracker every second or two; a slow board takes some more to register.
FIND_TIMEOUT_S = 45.0


def prove(tracker: Tracker, kernels: golden.GoldenKernels, target: ProvisioningTarget) -> str:
    """Borrow the board from a tracker that it can reach, run the golden kernel, and say what was seen.

    Raises PermanentError for a kernel that fails or computes something else, and what `BoardSession` raises.
    """
    with BoardSession(tracker, target.key, FIND_TIMEOUT_S) as session:
        about = session.description
        kernel = calibration.require_kernel(kernels, require_board_type(target.options.board_type), about.architecture)
        outcome = calibration.require_right(session, kernel)
    median_s = statistics.median(outcome.latency_s)
    return f"agent {about.agent_version}, protocol {about.protocol_version}, golden kernel {median_s * 1e3:.2f} ms"


# A step that waits for its board ends with the connection, which is at once; closing it takes 2 s at most.
INTERRUPT_S = 10.0


def provision_boards(
    targets: Sequence[ProvisioningTarget], job: ProvisioningJob, jobs: int = 8
) -> tuple[BoardReport, ...]:
    """Work on all boards, `jobs` of them at a time; the reports come in the order of `targets`.

    A KeyboardInterrupt ends the work on all boards within seconds; it is told by the reports, not raised.
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
