"""`farm init`: the first files of a farm, and the schemas of files."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from farm import settings
from farm.cli import options, output
from farm.crew import local
from farm.errors import UsageError
from farm.inventory import board_types, fleet_document
from farm.values import Ssh

# Small enough to end within minutes, as a demonstration.
_FIRST_MODEL, _FIRST_TRIALS = "tiny-cnn", 24
_MODELINE = "# yaml-language-server: $schema={}.schema.json\n"
# A file's kind, with the module and the model of its top-level keys.
KINDS = {"campaign": ("farm.campaign.spec", "CampaignSpec"), "fleet": ("farm.inventory.fleet_document", "Group")}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Virtual boards for users without boards: enough to show a fleet, few enough for a small machine.
_VIRTUAL = 2


@dataclasses.dataclass(frozen=True)
class Start:
    """The first boards of a farm: those at SSH addresses, and a number of virtual ones, of one type."""

    board_type: str
    ssh: Sequence[Ssh] = ()
    virtual: int = 0


def write_fleet(start: Start) -> str:
    """Return a fleet file. With `ssh` empty and `virtual` 0 it has no boards."""
    lines = [
        "# The boards of your farm. After a change: `farm fleet apply fleet.yaml`. Everything that may stand here is",
        "# in docs/howto/describe-a-fleet.md; editors complete keys by the schema that the first line names.",
        "groups:",
    ]
    if start.ssh:
        lines += [
            "  boards:",
            "    vars:",
            f"      type: {_scalar(start.board_type)} # `farm board list --types` lists them",
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
    """Return a small campaign for these boards."""
    return _MODELINE.format("campaign") + (
        "# What is tuned, for which boards, and how long. docs/howto/plan-a-campaign.md has everything that may stand\n"
        "# here; `farm campaign run --dry-run campaign.yaml` says what it takes.\n"
        "name: first\n"
        f"models: [{_FIRST_MODEL}] # names from `farm model zoo`, or paths of ONNX files\n"
        f"boards: {{ types: [{_scalar(start.board_type)}] }}\n"
        f"budget: {{ trials: {_FIRST_TRIALS} }} # hundreds for each workload, for code to ship\n"
    )


def _scalar(text: str) -> str:
    """Quote a text that YAML would read as another type: `no`, an IPv6 address."""
    return text if yaml.safe_load(f"[{text}]") == [text] else json.dumps(text)


def write_settings() -> str:
    """Return all settings with meanings and defaults, as comments in a file of environment variables."""
    lines = [
        "# Settings of the farm. A shell takes them by `set -a; . ./settings.env; set +a`, the coordinator's service",
        "# from /etc/tvm-farm/NAME.env. Take the # away before what you set; what is shown are the defaults.",
    ]
    for field in dataclasses.fields(settings.Settings):
        lines += ["", f"# {field.metadata['meaning']}", f"#{field.metadata['env']}={field.default}"]
    return "\n".join(lines) + "\n"


def list_next(start: Start) -> list[tuple[str, str]]:
    """Return the next commands to type in the folder of the files, with their meaning."""
    steps = [("farm fleet apply fleet.yaml", "registers the boards")]
    names = [f"{start.board_type}-{number}" for number in range(1, len(start.ssh) + 1)]
    if names:
        steps += [
            (f"farm board trust {' '.join(names)}", "shows the host keys' fingerprints and asks"),
            (f"farm board provision {' '.join(names)}", "puts the agent on them"),
        ]
    return [*steps, ("farm campaign run campaign.yaml --compile packages", "tunes a small model and packs its code")]


def make_schema(kind: str) -> str:
    """Return the schema of one kind of file. Raises UsageError."""
    if kind not in KINDS:
        raise UsageError(f"there is no schema of {kind!r}", f"Known: {', '.join(KINDS)}.")
    module, name = KINDS[kind]
    model: Any = getattr(importlib.import_module(module), name)
    made = {"$schema": _DIALECT} | model.model_json_schema() | {"title": f"tvm-farm {kind} file"}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


@output.command
def init(
    board_type: Annotated[str | None, typer.Option("--board-type", metavar="TYPE", help="Type of the boards.")] = None,
    ssh: Annotated[
        list[str] | None,
        typer.Option("--ssh", metavar="[USER@]HOST[:PORT]", help="SSH address of a board; repeatable."),
    ] = None,
    virtual: Annotated[
        int,
        typer.Option(
            "--virtual", metavar="N", min=0, max=fleet_document.MAX_EXPANDED, help="Number of virtual boards."
        ),
    ] = 0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write the files into.")] = Path(),
    schema: Annotated[
        str, typer.Option("--schema", metavar="campaign|fleet", help="Only print the JSON Schema of such files.")
    ] = "",
) -> output.Document:
    """Write a fleet file, a first campaign and settings, with comments; say what to do next. Nothing is registered.

    Without --ssh and --virtual it asks what boards there are.
    """
    if schema:
        text = make_schema(schema)
        yield json.loads(text)
        print(text, end="")
        return
    if ssh or virtual:
        if board_type is None:
            raise UsageError("--board-type is missing", "`farm board list --types` lists them.")
        start = _check(board_type, [options.read_ssh(text) for text in ssh or []], virtual)
    elif sys.stdin.isatty() and sys.stderr.isatty():
        try:
            start = _ask(board_type)
        except typer.Abort:
            raise UsageError("the questions were not answered; nothing was written") from None
    else:
        raise UsageError(
            "stdin is not a terminal",
            "Give --board-type TYPE, with --ssh USER@HOST for each board, or --virtual N. "
            "docs/howto/describe-a-fleet.md says how to write a fleet file yourself.",
        )
    files = _write(out, start)
    steps = list_next(start)
    yield {"files": [str(path) for path in files], "next": [{"command": c, "effect": e} for c, e in steps]}
    for path in files:
        output.say(f"wrote {path}")
    output.say("\nNext" + (f", in {out}:" if out != Path() else ":"))
    for command, effect in steps:
        output.say(f"    {command}    # {effect}")


def _check(board_type: str, ways: list[Ssh], virtual: int) -> Start:
    kind = board_types.require_board_type(board_type)
    if kind.host_is_board:
        raise UsageError(
            f"this machine, {kind.name!r}, needs no fleet file", "`farm quickstart` and `farm tune MODEL` use it."
        )
    if virtual:
        local.require_model(kind)
    return Start(kind.name, ways, virtual)


def _ask(board_type: str | None) -> Start:
    """Ask a person for the same; ask again after a wrong answer. Raises typer.Abort at the input's end."""
    names = [each.name for each in board_types.load_board_types().values() if not each.host_is_board]
    if board_type is None:
        output.stderr.print(f"Board types: {', '.join(names)}", markup=False)
        board_type = _prompt("What type are your boards of? (none yet: the type that you think of)", names[0])
        while board_type not in names:
            board_type = _prompt(f"There is no type {board_type!r}. Which of those above?", names[0])
    ways: list[Ssh] = []
    while text := _prompt(f"SSH address of board {len(ways) + 1}, [USER@]HOST[:PORT] (empty: no more)", ""):
        try:
            ways.append(options.read_ssh(text))
        except UsageError as error:
            output.stderr.print(f"{error}", markup=False)
    if ways:
        return _check(board_type, ways, 0)
    output.stderr.print("No boards: virtual ones then, which are simulated on this machine.")
    return _check(board_type, [], _VIRTUAL)


def _prompt(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default, show_default=bool(default), err=True)).strip()


def _write(folder: Path, start: Start) -> list[Path]:
    """Write all files, or none where one exists. Raises UsageError."""
    texts = {"fleet.yaml": write_fleet(start), "campaign.yaml": write_campaign(start), "settings.env": write_settings()}
    texts |= {f"{kind}.schema.json": make_schema(kind) for kind in KINDS}
    if there := [name for name in texts if (folder / name).exists()]:
        raise UsageError(f"{folder / there[0]} is there already", "Give another folder: --out DIR.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    return [folder / name for name in texts]
