"""The first files of a farm, as texts with comments: a fleet, a campaign for it, settings. They are not written here.

What such files may hold in full is in the examples of `inventory/`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import yaml

from farm import settings
from farm.values import Ssh

# Small enough to end within minutes, for a look at what a campaign is.
_FIRST_MODEL, _FIRST_TRIALS = "tiny-cnn", 24
_MODELINE = "# yaml-language-server: $schema={}.schema.json\n"


@dataclasses.dataclass(frozen=True)
class Start:
    """The boards that somebody begins with: those at SSH addresses, and a number of virtual ones, of one type."""

    board_type: str
    ssh: Sequence[Ssh] = ()
    virtual: int = 0


def write_fleet(start: Start) -> str:
    """A fleet file. With `ssh` empty and `virtual` 0 it has no boards."""
    lines = [
        "# The boards of your farm. After a change: `farm fleet apply fleet.yaml`. Everything that may stand here is",
        "# in docs/howto/describe-a-fleet.md; editors complete keys by the schema that the first line names.",
        "groups:",
    ]
    if start.ssh:
        lines += [
            "  boards:",
            "    vars:",
            f"      type: {_scalar(start.board_type)} # `farm board types` lists them",
            "      transport: ssh",
            "      # labels: { site: lab } # what campaigns may choose boards by",
            "      # key_file: ~/.ssh/tvm-farm # a private key's path, where OpenSSH's configuration names none",
            "    hosts:",
        ]
        for number, way in enumerate(start.ssh, 1):
            lines += [f"      {start.board_type}-{number}:", f"        address: {_scalar(way.host)}"]
            lines += [f"        user: {_scalar(way.user)}"] if way.user else []
            lines += [f"        port: {way.port}"] if way.port != Ssh.port else []
    if start.virtual:
        lines += [
            "  virtual: # made by the farm on this machine; everything they say is marked simulated",
            f"    vars: {{ type: {_scalar(start.board_type)}, transport: virtual }}",
            "    hosts:",
            f"      sim-{start.board_type}: {{ count: {start.virtual} }}",
        ]
    return _MODELINE.format("fleet") + "\n".join(lines) + "\n"


def write_campaign(start: Start) -> str:
    """A small campaign for these boards."""
    return _MODELINE.format("campaign") + (
        "# What is tuned, for which boards, and how long. docs/howto/plan-a-campaign.md has everything that may stand\n"
        "# here; `farm campaign plan campaign.yaml` says what it comes to.\n"
        "name: first\n"
        f"models: [{_FIRST_MODEL}] # names from `farm model zoo`, or paths of ONNX files\n"
        f"boards: {{ types: [{_scalar(start.board_type)}] }}\n"
        f"budget: {{ trials: {_FIRST_TRIALS} }} # hundreds for each workload, for code to ship\n"
    )


def _scalar(text: str) -> str:
    """In quotes where YAML would take it for something else: `no`, an IPv6 address."""
    return text if yaml.safe_load(f"[{text}]") == [text] else json.dumps(text)


def write_settings() -> str:
    """All settings with their meanings and defaults, as comments in a file of environment variables."""
    lines = [
        "# Settings of the farm. A shell takes them by `set -a; . ./settings.env; set +a`, the coordinator's service",
        "# from /etc/tvm-farm/NAME.env. Take the # away before what you set; what is shown are the defaults.",
    ]
    for field in dataclasses.fields(settings.Settings):
        lines += ["", f"# {field.metadata['meaning']}", f"#{field.metadata['env']}={field.default}"]
    return "\n".join(lines) + "\n"


def list_next(start: Start) -> list[tuple[str, str]]:
    """What to type next, in the folder of the files: commands, and what each does."""
    steps = [("farm fleet apply fleet.yaml", "registers the boards")]
    names = [f"{start.board_type}-{number}" for number in range(1, len(start.ssh) + 1)]
    if names:
        steps += [
            (f"farm board trust {' '.join(names)}", "shows the host keys' fingerprints and asks"),
            (f"farm board provision {' '.join(names)}", "puts the agent on them"),
        ]
    return [*steps, ("farm campaign run campaign.yaml --compile packages", "tunes a small model and packs its code")]
