"""Provision several boards at once; one that fails does not stop the others."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

from farm.provision.board import Provisioner, ProvisioningJob, ProvisioningTarget
from farm.provision.reports import BoardReport
from farm.provision.wheels import end_tools

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
