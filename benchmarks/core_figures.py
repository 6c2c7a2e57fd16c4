"""What this machine's core can do, asked as `farm board certify` asks a board's, beside what its core type says.

One row for each time it is asked: what could be told, what could not, and how long it took. Default budget: 3 minutes.
"""

from __future__ import annotations

import os
import time
from typing import Any

import _farm
import _machine

import farm.settings
from farm.inventory.core_figures import find_differing, list_values
from farm.inventory.core_types import find_core_type
from farm.search.target import host_target
from farm.services.core_probe import probe_core


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--times", type=int, default=2, help="times it is asked (default: 2)")
    options = parser.parse_args()
    if options.quick:
        options.times = 1
    with _machine.only_json() as emit, _machine.scratch():
        emit("core_figures", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    target = host_target(_machine.cores())
    kind = find_core_type(target["mcpu"], target["mtriple"].partition("-")[0])
    if kind is None:
        raise SystemExit(f"no core type matches {target['mcpu']}")
    rows = []
    with _farm.quiet_board(farm.settings.load()) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for _ in range(options.times):
            began, load = time.perf_counter(), os.getloadavg()[0]
            found = probe_core(session, kind, target, _machine.cores()).to_dict()
            differing = find_differing(list_values(found), kind.list_figures())
            took_s = _machine.round_to(time.perf_counter() - began)
            rows.append(found | {"differing": differing, "took_s": took_s, "load": load})
            _machine.say(str(rows[-1]))
    return {"machine_quiet": quiet, "target": target, "type": kind.list_figures(), "asked": rows}


if __name__ == "__main__":
    main()
