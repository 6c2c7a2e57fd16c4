"""Measure this machine's peak: FMAs in registers alone, and plain copies of several sizes.

The least of several rounds, since other load can only add to a time. Default budget: 20 seconds.
"""

from __future__ import annotations

from typing import Any

import _farm
import _machine
import _peak

import farm.settings
from farm.search.target import host_target


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each (default: 10)")
    parser.add_argument(
        "--sizes", default="16384,262144,2097152,33554432", help="bytes per copy (default: 16 KiB to 32 MiB)"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    with _machine.only_json() as emit, _machine.scratch():
        emit("machine_peak", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    settings = farm.settings.load()
    target = host_target(_machine.cores())
    threads, sizes = ([int(text) for text in texts.split(",")] for texts in (options.threads, options.sizes))
    peaks = _peak.Peaks(target, threads, sizes)
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for _ in range(options.rounds):
            peaks.measure(session, settings)
    return {
        "machine_quiet": quiet,
        "target": target,
        "gflops_is": "float32, of all threads together, an FMA counted as two",
        "copy_is": "by bytes copied; gb_per_s counts what is read and what is written",
        "threads": peaks.summary,
    }


if __name__ == "__main__":
    main()
