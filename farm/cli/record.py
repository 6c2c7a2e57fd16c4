"""`farm record`: the best verified code there is."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from farm.cli import options, output
from farm.inventory.board_types import require_board_type

app = typer.Typer(help="Records: the best verified trial of each workload.", no_args_is_help=True)


@app.command("list")
def list_records(
    board_type: Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Of this board type only.")] = "",
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Those of virtual boards instead of real ones.")
    ] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the records in the store."""

    def work() -> None:
        kind = require_board_type(board_type).name if board_type else None
        with options.open_store() as store:
            records = store.fetch_records(board_type=kind, simulated=simulated)
            others = 0 if records else len(store.fetch_records(board_type=kind, simulated=not simulated))
        if json:
            output.print_json(
                [
                    {
                        "workload": r.workload,
                        "name": r.workload_name,
                        "board_type": r.board_type,
                        "operating_point": r.operating_point,
                        "pipeline": r.pipeline,
                        "candidate": r.candidate,
                        "latency_us": r.median_s * 1e6,
                        "gflops": r.flop / r.median_s / 1e9,
                        "max_rel_error": r.max_rel_error,
                        "simulated": r.simulated,
                        "verified_at": r.verified_at,
                    }
                    for r in records
                ]
            )
            return
        output.print_table(
            ("Workload", "Name", "Board type", "Clocks", "GFLOPS", "Latency (us)", "Max rel. error", "Verified"),
            [
                (
                    r.workload,
                    r.workload_name,
                    r.board_type + (" (simulated)" if r.simulated else ""),
                    r.operating_point,
                    f"{r.flop / r.median_s / 1e9:.2f}",
                    f"{r.median_s * 1e6:,.1f}",
                    f"{r.max_rel_error:.1e}",
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(r.verified_at)),
                )
                for r in records
            ],
            left=(0, 1, 2, 3, 7),
            empty="no records yet; `farm tune MODEL` makes some",
        )
        if others:
            which = "real boards; leave out --simulated" if simulated else "virtual boards; add --simulated"
            output.stderr.print(f"there are {others} of {which} to see them")

    output.run(work, debug)
