"""Puts the nouns together; `main` is the console script."""

from __future__ import annotations

import sys

import typer

import farm
from farm.cli import (
    board,
    board_certify,
    board_remote,
    board_trust,
    bundle,
    campaign,
    campaign_orders,
    campaign_run,
    doctor,
    fleet,
    model,
    provision,
    quickstart,
    record,
    services,
    store,
    sweep,
    sweep_report,
    tune,
)
from farm.fleet.listening import raise_descriptor_limit

app = typer.Typer(
    name="farm",
    help="Tune neural networks on the boards you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(quickstart.quickstart)
app.command("tune")(tune.tune)
app.command("doctor")(doctor.doctor)
app.command("up")(services.up)
app.command("down")(services.down)
app.command("status")(services.status)
app.command("backup")(store.backup)
app.command("restore")(store.restore)
app.add_typer(store.app, name="db")
board.app.command("probe")(services.probe)
board_remote.register(board.app)
board.app.command("trust")(board_trust.trust)
board.app.command("provision")(provision.provision)
board.app.command("doctor")(doctor.board_doctor)
board.app.command("certify")(board_certify.certify)
app.add_typer(model.app, name="model")
app.add_typer(record.app, name="record")
app.add_typer(board.app, name="board")
app.add_typer(fleet.app, name="fleet")
app.add_typer(sweep.app, name="sweep")
sweep_report.register(sweep.app)
app.add_typer(bundle.app, name="bundle")
campaign_run.register(campaign.app)
campaign_orders.register(campaign.app)
app.add_typer(campaign.app, name="campaign")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tvm-farm {farm.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show version and exit."),
) -> None:
    """Tune neural networks on the boards you own."""


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    raise_descriptor_limit()  # a sweep, or a provisioning, may hold a rack of boards
    sys.exit(app())
