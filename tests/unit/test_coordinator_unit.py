"""The unit that keeps a coordinator's services up asks for what the farm offers."""

from __future__ import annotations

import configparser
import pathlib

import typer.main

from farm.cli.main import make_app
from farm.connectivity.services import SERVICES

UNIT = pathlib.Path(__file__).parents[2] / "deploy" / "coordinator" / "tvm-farm@.service"


def test_the_coordinators_unit_starts_what_there_is() -> None:
    """Its command is one of ours; it comes back after every end but `farm down`, which has its time to finish."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(UNIT)
    service = unit["Service"]
    program, command, *options = service["ExecStart"].split()
    assert program.endswith("/bin/farm")
    commands = typer.main.get_group(make_app()).commands
    known = {name for option in commands[command].params for name in option.opts}
    assert options == ["--foreground"]
    assert set(options) <= known
    assert service["Restart"] == "on-failure"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert float(service["TimeoutStopSec"]) > SERVICES.stop_timeout_s
    # The control socket of the services is in the system's temporary folder.
    assert "PrivateTmp" not in service
