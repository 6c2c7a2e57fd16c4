"""`farm board`: the boards that the farm knows, and the types that a board can be of.

Registering and ordering only: nothing here connects to a board. What an order means for a board's health is decided in
`farm/crew/health.py` and kept by the store.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import typer

from farm import settings
from farm.cli import board_power, board_remote, board_types, options, output, provision, services, tables
from farm.connectivity import host_keys
from farm.connectivity.services import SERVICES
from farm.crew import health, local, queue_entry
from farm.errors import UsageError
from farm.inventory import board_types as inventory_board_types
from farm.inventory import fleet_addresses, fleet_document
from farm.processes import machine
from farm.store import Store, standing
from farm.values import Direct, Health, Ssh, State, Transport, Virtual

app = typer.Typer(help="Boards: register, reach, provision and inspect them; board types.", no_args_is_help=True)
app.command("show")(board_types.show)

Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the board's events.")]
# Longest wait for a board that is reserved.
_RESERVE_WAIT_S = 600.0
# What ends an operator's hold, by the board's health.
_ENDS = {
    Health.MAINTENANCE: health.Kind.UNDRAIN,
    Health.QUARANTINED: health.Kind.CLEAR,
    Health.UNSAFE: health.Kind.CLEAR,
    Health.RETIRED: health.Kind.CLEAR,
    Health.SUSPECT: health.Kind.CLEAR,
}


@app.command("list")
@output.command
def list_boards(
    board_type: Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Only this type.")] = "",
    state: Annotated[State | None, typer.Option("--state", help="Only boards in this state.")] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Only boards with it; repeatable.")
    ] = None,
    types: Annotated[bool, typer.Option("--types", help="List the board types instead, yours among them.")] = False,
) -> output.Document:
    """List the boards. Each with state, health, and who holds it since when; or the types that there are."""
    if types:
        known = inventory_board_types.load_board_types()
        yield [each.model_dump(mode="json", by_alias=True) for each in known.values()]
        board_types.print_types(known.values())
        return
    kind = inventory_board_types.require_board_type(board_type).name if board_type else ""
    wanted = standing.BoardFilters(board_type=kind, state=state or "", labels=_read_labels(labels or []))
    with options.open_store() as store:
        boards = list(filter(wanted.matches, store.boards.fetch()))
    # States are old where services were killed.
    reached = [board for board in boards if board.state != State.OFFLINE and board.transport["kind"] != Direct.kind]
    if reached and not SERVICES.is_held(settings.load().home_path):
        output.stderr.print("the farm's services are not running, so states are those of the last time; see `farm up`")
    yield boards
    tables.print_table(
        ("Name", "Type", "Simulated", "State", "Health", "Why", "Held by", "Labels", "Last seen"),
        [
            (
                board.name,
                board.board_type,
                "yes" if board.simulated else "no",
                board.state,
                board.health,
                "–" if (cause := standing.find_cause(board)) is None else cause.why,
                output.holder(board.lease),
                ", ".join(f"{key}={value}" for key, value in board.labels.items()) or "–",
                output.moment(board.seen_at),
            )
            for board in boards
        ],
        left=(0, 1, 2, 3, 4, 5, 6, 7, 8),
        spare=("Labels", "Last seen", "Simulated"),
        empty="no such boards"
        if wanted.chooses
        else "no boards yet; `farm quickstart` and `farm tune` add this machine, `farm board add` others",
    )


@app.command("add")
@output.command
def add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    board_type: Annotated[str | None, typer.Option("--board-type", metavar="TYPE", help="Type of the board.")] = None,
    ssh: Annotated[
        str | None,
        typer.Option("--ssh", metavar="[USER@]HOST[:PORT]", help="SSH address; HOST may be an alias of ~/.ssh/config."),
    ] = None,
    virtual: Annotated[
        str | None,
        typer.Option(
            "--virtual",
            metavar="TYPE",
            help="Board type of which to make a virtual board. Its own code is emulated where its core is described.",
        ),
    ] = None,
    time: Annotated[
        Literal["lapsed", "live"],
        typer.Option("--time", help="Time of virtual boards: jumps (lapsed) or passes with this machine's (live)."),
    ] = "lapsed",
    count: Annotated[int, typer.Option("--count", metavar="N", help="Number of virtual boards, NAME-1 to NAME-N.")] = 1,
    key_file: Annotated[str, typer.Option("--key-file", metavar="PATH", help="Private key file for --ssh.")] = "",
    host_key: Annotated[
        str, typer.Option("--host-key", metavar="SHA256:…", help="Fingerprint of the host's key.")
    ] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Label of the board; repeatable.")
    ] = None,
) -> None:
    """Register a board, or several virtual ones. It is `suspect` until it has been probed."""
    if (ssh is None) == (virtual is None):
        raise UsageError("say how the board is reached", "Give --ssh USER@HOST with --board-type, or --virtual TYPE.")
    if virtual is None and board_type is None:
        raise UsageError("--ssh needs --board-type", "`farm board list --types` lists them.")
    kind = inventory_board_types.require_board_type(virtual or board_type or "")
    if kind.host_is_board:
        raise UsageError(
            f"board type {kind.name!r} stands for the local machine, which needs no registering",
            "Another machine without a type of its own is an x86-64-v3 or an armv8-a.",
        )
    wanted: dict[str, Transport]
    if virtual is not None:
        local.require_model(kind)
        if board_type not in (None, virtual) or key_file or host_key:
            raise UsageError("--virtual goes with neither --board-type nor a key", "Give the type once.")
        wanted = _number(name, count, live=time == "live")
    elif count != 1:
        raise UsageError("--count is for virtual boards", "A fleet file registers many at once: `farm fleet apply`.")
    else:
        fingerprint = host_keys.require_fingerprint(host_key) if host_key else ""
        wanted = {name: options.read_ssh(ssh or "", key_file, fingerprint)}
    with options.open_store() as store:
        rows = store.boards.fetch()
        if taken := sorted({board.name for board in rows} & wanted.keys()):  # all or none
            raise UsageError(f"there is a board {taken[0]!r} already", "Remove it first, or give another name.")
        ends = [(board.name, standing.parse_transport(board.transport)) for board in rows]
        for each, transport in wanted.items():
            fleet_addresses.require_new_end(each, transport, ends)
            store.boards.register(each, kind.name, transport, _read_labels(label or []), by=machine.name_user())
    for each in wanted:
        output.stdout.print(f"added {each}, {kind.name}{' (simulated)' if virtual else ''}")


def _number(name: str, count: int, live: bool) -> dict[str, Transport]:
    if not 1 <= count <= fleet_document.MAX_EXPANDED:
        raise UsageError(f"--count must be 1 to {fleet_document.MAX_EXPANDED}, not {count}")
    names = [name] if count == 1 else fleet_document.number(name, count)
    return {each: Virtual(seed, live=live) for seed, each in enumerate(names)}


@app.command("remove")
@output.command
def remove(names: options.Boards) -> None:
    """Forget boards, all or none. Their trials and events stay; a board that is leased is refused."""
    with options.open_store() as store:
        chosen = dict.fromkeys(names)
        store.boards.remove(*chosen, by=machine.name_user())
    for name in chosen:
        output.stdout.print(f"removed {name}")


@app.command("replace")
@output.command
def replace(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    ssh: Annotated[
        str | None,
        typer.Option("--ssh", metavar="USER@HOST[:PORT]", help="SSH address of the new machine, if it differs."),
    ] = None,
    why: Why = "",
) -> None:
    """Give a board's name to another machine. Its host key is new, and nothing of the old one counts for it.

    Trials and events of the old one stay, with an event between the two. A probe decides about the new one.
    """
    known_hosts = host_keys.KnownHosts(settings.load().home_path / host_keys.FILE_NAME)
    with options.open_store() as store:
        before = standing.parse_transport(store.boards.require(name).transport)
        after = before
        if isinstance(before, Ssh):
            after = dataclasses.replace(before, host_key="")
            if ssh is not None:
                where = options.read_ssh(ssh, before.identity_file)
                after = dataclasses.replace(after, host=where.host, user=where.user, port=where.port)
        elif ssh is not None:
            raise UsageError(f"{name} is not reached over SSH", "Leave --ssh out.")
        ends = [(row.name, standing.parse_transport(row.transport)) for row in store.boards.fetch()]
        fleet_addresses.require_new_end(name, after, ends)
        store.boards.replace(name, transport=after, labels=None, reason=why, by=machine.name_user())
    if isinstance(before, Ssh):
        known_hosts.remove(before.host, before.port)
    output.stdout.print(f"{name} is another machine now: suspect until it has been probed", markup=False)
    if isinstance(after, Ssh):
        output.stdout.print(f"its host key is to be confirmed: farm board trust {name}", markup=False)


@app.command("hold")
@output.command
def hold(
    names: options.Boards,
    why: Why = "",
    for_: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Reserve one board for yourself: 30m, 2h; up to 7 days.")
    ] = "",
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Do not trust what it measured lately.")] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Keep it for its history only.")] = False,
) -> output.Document:
    """Give boards no new work, until `farm board release`. With --for only your own work gets the board.

    A campaign gives a reserved board up after the trial under way. Reserved again, it is yours for that time from now.
    """
    if sum((bool(for_), quarantine, retire)) > 1:
        raise UsageError("--for, --quarantine and --retire exclude each other")
    if not for_:
        kind = health.Kind.QUARANTINE if quarantine else health.Kind.RETIRE if retire else health.Kind.DRAIN
        yield from _order(kind, names, why)
        return
    if len(names) != 1:
        raise UsageError("--for reserves one board", "Reserve others by a command each.")
    for_s = options.read_duration_s("--for", for_)
    with options.open_store() as store:
        lease, new = queue_entry.reserve(store, names[0], for_s, why, _RESERVE_WAIT_S, output.note)
    about = {"board": names[0], "owner": lease.owner, "purpose": lease.purpose}
    yield about | {"until": lease.expires_at, "new": new}
    output.stdout.print(f"{names[0]} is yours until {output.moment(lease.expires_at)}", markup=False)
    output.stderr.print(f"to give it back before: farm board release {names[0]}", markup=False)


@app.command("release")
@output.command
def release(
    names: options.Boards,
    why: Why = "",
    force: Annotated[bool, typer.Option("--force", help="Revoke another's lease.")] = False,
) -> output.Document:
    """End what holds boards: a reservation, `hold`, a quarantine or, by force, a lease. A probe decides about them."""
    done = [_release(name, why, force) for name in dict.fromkeys(names)]
    yield [{"board": name, "done": said} for name, said in done]
    for name, said in done:
        output.stdout.print(f"{name}: {said}", markup=False)


def _release(name: str, why: str, force: bool) -> tuple[str, str]:
    """End what holds a board. Raises UsageError where that is another's lease."""
    with options.open_store() as store:
        board = store.boards.require(name)
        mine = board.is_reserved_by(machine.name_user())
        if board.lease is not None and (force or mine):
            ended = store.leases.force_release(
                name, machine.name_user(), why or ("given back before its time" if mine else "")
            )
            return name, "released" if ended else "has no holder"
        kind = _ENDS.get(board.health)
        if kind is not None:
            return name, _observe(store, kind, [name], why)[name][1]
        if board.lease is not None:
            raise UsageError(
                f"{name} is held by {output.holder(board.lease)}",
                "It is given back by its holder, or taken with --force --why TEXT.",
            )
    return name, "has no holder"


def _order(kind: health.Kind, names: list[str], why: str) -> output.Document:
    """Order the same of boards: of all, or of none where one of them refuses it."""
    with options.open_store() as store:
        done = _observe(store, kind, names, why)
    yield [{"board": name, "health": now} for name, (now, _) in done.items()]
    for name, (_, said) in done.items():
        output.stdout.print(f"{name}: {said}")


def _observe(store: Store, kind: health.Kind, names: list[str], why: str) -> dict[str, tuple[str, str]]:
    """Return each board's health, and what to say of it."""
    decide = health.decide_by(health.Observation(kind, why))
    results = store.boards.observe_several(list(dict.fromkeys(names)), str(kind), machine.name_user(), decide)
    return {
        name: (now := str(each.standing.health), now + (f"; {each.reason}" if each.reason else " already"))
        for name, each in results.items()
    }


def _read_labels(texts: list[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or key in labels:
            raise UsageError(f"{text!r} is no label", "Labels are KEY=VALUE, each key once.")
        labels[key.strip()] = value.strip()
    return fleet_document.check_labels(labels)


# Verbs with a module of their own.
app.command("probe")(services.probe)
app.command("exec", cls=board_remote.CommandWithRest)(board_remote.execute)
app.command("logs")(board_remote.logs)
app.command("trust")(board_remote.trust)
app.command("provision")(provision.provision)
app.command("power")(board_power.power)
app.command("bundle")(provision.bundle)
