"""`farm gate`: passes or fails a change of a model, or of its tuning, in a CI system."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import gate as gates
from farm import settings as farm_settings
from farm.artifacts import artifact_folder, bench, checking, make, on_board
from farm.cli import model_evaluate, options, output, tables
from farm.cli.model_board import read_subject
from farm.cli.options import read_duration_s
from farm.errors import PermanentError, UsageError
from farm.evaluation import datasets
from farm.evaluation import evaluate as evaluation
from farm.inventory import board_types
from farm.points import requests
from farm.report import gate_page
from farm.search import gpus
from farm.store import Store


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
            "Known: latency, p90, p99, energy, size, memory; and on --data top1, top5, map50, map, as in "
            '"top1 < -0.5 %".',
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="Labelled images, as for `farm model evaluate`.")
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Make this the baseline, instead of comparing with it.")
    ] = False,
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
    conditions = gates.read_conditions(fail_if or [])
    if not conditions and not write_baseline:
        raise UsageError("say what must not be: --fail-if CONDITION", gates.EXAMPLES)
    point, wait_s = requests.parse_point(operating_point), read_duration_s("--wait", wait)
    names = list(dict.fromkeys(name.strip() for name in boards.split(",") if name.strip()))
    if not names:
        raise UsageError("--boards names none", "`farm board list --types` and `farm board list` show which there are.")
    known = None if write_baseline else gates.read_baseline(baseline)
    for path in (junit, summary, baseline):
        if path is not None:
            artifact_folder.require_room(path.absolute().parent)
    settings = farm_settings.load()
    parts: list[dict[str, Any]] = []
    with options.open_store(settings) as store, tempfile.TemporaryDirectory(prefix="farm-gate-") as scratch:
        given = read_subject(model, shape, device)
        examples, task = _read_data(given, data, conditions)
        for name in names:
            kind, only, simulated = _find_boards(store, name)
            candidate = given.artifact
            if candidate is None:
                folder = Path(scratch) / f"{kind.name}{'-simulated' * simulated}"
                candidate = _compile(given, kind, simulated, operating_point, folder, settings, store)
            about = candidate.manifest
            before = gates.open_entry(baseline, known, about, operating_point) if known else None
            subject = dataclasses.replace(given, artifact=candidate, baseline=before)
            for artifact in subject.list_artifacts().values():
                on_board.prepare_gpu(artifact.manifest, settings)
            with on_board.hold_board(settings, store, (kind, only), wait_s, f"bench {about.name}", output.note) as held:
                held.pin(point, operating_point)
                cases = checking.make_cases(given.opened, about, [])
                verified = checking.verify_artifact(candidate, held, given.opened.source, cases)
                benched, [timed] = bench.bench([subject], held, kind, (), settings, store, output.note)
                made, scorer = subject.list_artifacts(), None
                if examples:
                    scorer = evaluation.score(made, None, held, examples, task, output.note)
            parts.append(gates.judge(subject, verified, benched, timed, conditions, scorer))
            if write_baseline and parts[-1]["verified"]["matches"]:
                latency_s = parts[-1]["candidate"]["latency_s"]["median"]
                gates.keep_baseline(baseline, candidate, operating_point, latency_s)
    verdict = gates.find_worst([part["verdict"] for part in parts])
    document = {"model": model, "baseline": str(baseline), "written": write_baseline, "undecided": "fail"}
    document |= {"verdict": verdict, "boards": parts}
    if junit is not None:
        junit.write_text(gate_page.write_junit(document), encoding="utf-8")
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:  # GITHUB_STEP_SUMMARY has what earlier steps wrote
            file.write(gate_page.write_summary(document))
    error = None
    if verdict == gates.FAIL or verdict == gates.UNDECIDED:
        hint = "" if verdict == gates.FAIL else "The intervals overlap: more runs decide."
        error = PermanentError(gate_page.explain(document), hint)
    yield output.Failed(document, error)
    if rows := gate_page.list_findings(document):
        tables.print_table(("Board", "Must not be", "Found", "Verdict"), rows, left=(0, 1, 2, 3))
    for part in parts:
        if part["doubt"]:
            output.say(f"do not rely on the latencies of {part['model']}, {part['doubt']}")
        median_s = part["candidate"]["latency_s"]["median"]
        kept = f"; kept in {baseline}" if write_baseline else ""
        output.say(f"{part['model']} on {part['board']}: {median_s * 1e3:.3f} ms{kept}")


def _read_data(subject: Any, data: Path | None, conditions: Sequence[gates.Condition]) -> tuple[list[Any], str]:
    """Return the examples that conditions on scores need, and the task. Raises UsageError."""
    wanted = [each.metric for each in conditions if each.metric in gates.SCORES]
    if not wanted:
        return [], ""
    if data is None:
        raise UsageError(f"--fail-if {wanted[0]} needs data", "Give labelled images: --data FOLDER.")
    facts = model_evaluate.describe(subject)
    task = datasets.choose_task(None, facts.task)
    if unknown := [each for each in wanted if each not in evaluation.METRICS[task]]:
        raise UsageError(f"--fail-if: {unknown[0]} is no score of this model", f"Its task: {task}.")
    return datasets.read_dataset(data, task, facts.names, facts.classes, 0), task


def _compile(subject: Any, kind: Any, simulated: bool, point: str, folder: Path, settings: Any, store: Any) -> Any:
    """Compile a model for boards of a type, with records of the operating point where there are any."""
    output.note(f"compiling {subject.opened.about.name} for {kind.name}; big models take minutes")
    order = make.CompileOrder(subject.opened, gpus.require_device(kind, subject.device), simulated=simulated)
    records = make.fetch_candidates(order, store).records
    if any(each.operating_point == point and each.board_type == order.board_type.name for each in records):
        order = dataclasses.replace(order, operating_point=point)
    return make.make_artifact(order, folder, settings, store, output.note)


def _find_boards(store: Store, name: str) -> tuple[Any, str | None, bool]:
    """Return the type, the board if one was named, and whether it is simulated. Raises UsageError."""
    rows = store.boards.fetch()
    types = board_types.load_board_types()
    if name in types and not any(row.name == name for row in rows):
        own = [row for row in rows if row.board_type == name]
        return types[name], None, bool(own) and all(row.simulated for row in own)
    kind, known = on_board.find_board(store, name)
    return kind, known, known is not None and store.boards.require(known).simulated
