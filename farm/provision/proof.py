"""Prove a provisioned board end to end: through the tunnel and the tracker to its agent, and a kernel really run there.

Health is not decided here: that is what the farm's probes are for.
"""

from __future__ import annotations

import statistics

from farm.connectivity.tracker import Tracker
from farm.crew import golden_runs
from farm.inventory.board_types import require_board_type
from farm.measure.session import BoardSession
from farm.provision.board import ProvisioningTarget
from farm.search.build import golden

# The agent looks for its tracker every second or two; a slow board takes some more to register.
FIND_TIMEOUT_S = 45.0


def prove(tracker: Tracker, kernels: golden.GoldenKernels, target: ProvisioningTarget) -> str:
    """Borrow the board from a tracker that it can reach, run the golden kernel, and say what was seen.

    Raises PermanentError for a kernel that fails or computes something else, and what `BoardSession` raises.
    """
    with BoardSession(tracker, target.key, FIND_TIMEOUT_S) as session:
        about = session.description
        kernel = golden_runs.require_kernel(kernels, require_board_type(target.options.board_type), about.architecture)
        outcome = golden_runs.require_right(session, kernel)
    median_s = statistics.median(outcome.latency_s)
    return f"agent {about.agent_version}, protocol {about.protocol_version}, golden kernel {median_s * 1e3:.2f} ms"
