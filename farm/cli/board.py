"""`farm board`: the boards that the farm knows."""

from __future__ import annotations

import time

import typer

from farm.cli import options, output

app = typer.Typer(help="Boards: who they are and when they were last seen.", no_args_is_help=True)


@app.command("list")
def list_boards(json: options.Json = False, debug: options.Debug = False) -> None:
    """List the boards in the store."""

    def work() -> None:
        with options.open_store() as store:
            boards = store.fetch_boards()
        if json:
            output.print_json(boards)
            return
        output.print_table(
            ("Name", "Type", "Simulated", "CPU", "Cores", "Agent", "Last seen"),
            [
                (
                    board["name"],
                    board["board_type"],
                    "yes" if board["simulated"] else "no",
                    board["description"].get("cpu_model"),
                    len(board["description"].get("cores_online", [])),
                    board["description"].get("agent_version"),
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(board["seen_at"])),
                )
                for board in boards
            ],
            left=(0, 1, 2, 3, 5, 6),
            empty="no boards yet; `farm quickstart` and `farm tune` add this machine",
        )

    output.run(work, debug)
