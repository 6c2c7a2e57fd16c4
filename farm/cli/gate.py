"""`farm gate`: passes or fails a change of a model, or of its tuning, in a CI system."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from farm import settings as farm_settings
from farm.artifacts import brought, make, manifest, on_board, places
from farm.cli import options, output, tables
from farm.cli.durations import read_duration_s
from farm.errors import PermanentError, UsageError
from farm.gate import baseline as baselines
from farm.gate import conditions as gate_conditions
from farm.gate import measuring
from farm.inventory import board_types
from farm.points import requests
from farm.report import gate_page
from farm.search import gpus


@output.command
def gate(
    model: Annotated[str, typer.Argument(metavar="MODEL|ARTIFACT", help="A model, or an artifact compiled from one.")],
    boards: Annotated[
        str, typer.Option("--boards", metavar="TYPE|NAME,…", help="Board types, one board of each, or boards by name.")
    ],
    baseline: Annotated[Path, typer.Option("--baseline", metavar="FILE.json", help="What it is held against.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="CONDITION",
            help='Condition that must not hold, such as "latency > 5 %" or "p99 > 40 ms"; repeatable. '
            "Known: latency, p90, p99, energy, size, memory.",
        ),
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Make this the baseline, instead of comparing with it.")
    ] = False,
    undecided: Annotated[
        Literal["fail", "pass"], typer.Option("--undecided", help="What it means that it cannot be told.")
    ] = "fail",
    operating_point: Annotated[
        str, typer.Option("--operating-point", metavar="POINT", help="Clocks to hold, such as mode=MAXN.")
    ] = "default",
    device: options.Device = "cpu",
    shape: options.Shapes = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE.xml", help="File for JUnit's XML.")] = None,
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE.md", help="File for a page; it is appended to.")
    ] = None,
    wait: Annotated[str, typer.Option("--wait", metavar="10m", help="Longest wait for each board.")] = "10m",
) -> output.Document:
    """Compile, check and time a model in turns with a baseline's on the same boards. Exit code 1 where it got worse."""
    conditions = gate_conditions.read_conditions(fail_if or [])
    if not conditions and not write_baseline:
        raise UsageError("say what must not be: --fail-if CONDITION", gate_conditions.EXAMPLES)
    point, wait_s = requests.parse_point(operating_point), read_duration_s("--wait", wait)
    names = list(dict.fromkeys(name.strip() for name in boards.split(",") if name.strip()))
    if not names:
        raise UsageError("--boards names none", "`farm board types` and `farm board list` show which there are.")
    known = None if write_baseline else baselines.read_baseline(baseline)
    for path in (junit, summary, baseline):
        if path is not None:
            places.require_room(path.absolute().parent)
    settings = farm_settings.load()
    parts: list[dict[str, Any]] = []
    with options.open_store(settings) as store, _scratch() as scratch:
        subject = _Subject(model, shape, device)
        for name in names:
            kind, only, simulated = _find_boards(store, name)
            candidate = subject.make(kind, simulated, operating_point, scratch, settings, store)
            about = candidate.manifest
            before = None
            if known is not None:
                key = (about.name, about.board_type, about.simulated, about.device, operating_point)
                before = baselines.open_entry(baseline, known, key)
            for artifact in (candidate, before):
                if artifact is not None:
                    on_board.prepare_gpu(artifact.manifest, settings)
            purpose = f"bench {about.name}"
            with on_board.hold_type(settings, store, kind, wait_s, purpose, output.note, only) as held:
                held.require_fit(about)
                held.pin(point, operating_point)
                order = measuring.GateOrder(subject.brought, candidate, before, conditions)
                parts.append(measuring.decide(order, held, settings, output.note))
            if write_baseline and parts[-1]["verified"]["matches"]:
                baselines.keep(baseline, candidate, operating_point, parts[-1]["candidate"]["latency_s"]["median"])
    verdict = gate_conditions.find_worst([gate_conditions.GateVerdict(part["verdict"]) for part in parts])
    document = {"model": model, "baseline": str(baseline), "written": write_baseline, "undecided": undecided}
    document |= {"verdict": str(verdict), "boards": parts}
    if junit is not None:
        junit.write_text(gate_page.write_junit(document), encoding="utf-8")
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:  # GITHUB_STEP_SUMMARY has what earlier steps wrote
            file.write(gate_page.write_summary(document))
    error = None
    if verdict is gate_conditions.GateVerdict.FAIL or (
        verdict is gate_conditions.GateVerdict.UNDECIDED and undecided == "fail"
    ):
        hint = "" if verdict is gate_conditions.GateVerdict.FAIL else "--undecided pass lets that pass."
        error = PermanentError(_say_why(document), hint)
    yield output.Failed(document, error)
    _print(document)


class _Subject:
    """What was given: an artifact, or a model that is compiled for each kind of board."""

    def __init__(self, text: str, shape: list[str] | None, device: str) -> None:
        self._device = device
        self._artifact = manifest.open_artifact(Path(text)) if places.is_artifact(Path(text)) else None
        if self._artifact is not None:
            self._artifact.require_whole()
        about = self._artifact
        self.brought = brought.bring(text, shape or ()) if about is None else brought.bring_again(about.manifest, None)

    def make(self, kind: Any, simulated: bool, point: str, scratch: Path, settings: Any, store: Any) -> Any:
        """The artifact for boards of a type."""
        if self._artifact is not None:
            return self._artifact
        output.note(f"compiling {self.brought.about.name} for {kind.name}; big models take minutes")
        order = make.CompileOrder(self.brought, gpus.require_device(kind, self._device), simulated=simulated)
        folder = scratch / f"{kind.name}{'-simulated' * simulated}"
        records = make.fetch_candidates(order, store).records
        if point in {record.operating_point for record in records if record.board_type == order.board_type.name}:
            order = dataclasses.replace(order, operating_point=point)
        return make.make_artifact(order, folder, settings, store, output.note)


def _find_boards(store: Any, name: str) -> tuple[Any, str | None, bool]:
    """The type, the board where one was named, and whether it is simulated. Raises UsageError."""
    rows = store.fetch_boards()
    types = board_types.load_board_types()
    if name in types and not any(row["name"] == name for row in rows):
        own = [row for row in rows if row["board_type"] == name]
        return types[name], None, bool(own) and all(row["simulated"] for row in own)
    kind, known = on_board.find_board(store, name)
    return kind, known, known is not None and bool(store.require_board(known)["simulated"])


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="farm-gate-") as folder:
        yield Path(folder)


def _print(document: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = []
    for part in document["boards"]:
        called = f"{part['board_type']}/{part['board']}{' (simulated)' if part['simulated'] else ''}"
        if not part["verified"]["matches"]:
            rows.append((called, "outputs agree", part["verified"]["reason"], "fail"))
        rows += [(called, each["condition"], gate_page.describe(each), each["verdict"]) for each in part["conditions"]]
    if rows:
        tables.print_table(("Board", "Must not be", "Found", "Verdict"), rows, left=(0, 1, 2, 3))
    for part in document["boards"]:
        if part["candidate"] is not None:
            median_s = part["candidate"]["latency_s"]["median"]
            kept = f"; kept in {document['baseline']}" if document["written"] else ""
            output.say(f"{part['model']} on {part['board']}: {median_s * 1e3:.3f} ms{kept}")


def _say_why(document: dict[str, Any]) -> str:
    reasons = []
    for part in document["boards"]:
        if not part["verified"]["matches"]:
            reasons.append(f"wrong outputs on {part['board']}: {part['verified']['reason']}")
        reasons += [
            f"{each['condition']} {'holds' if each['verdict'] == 'fail' else 'cannot be ruled out'} on "
            f"{part['board']}: {gate_page.describe(each)}"
            for each in part["conditions"]
            if each["verdict"] != "pass"
        ]
    return "; ".join(reasons)
