"""`farm model compile`, `verify` and `package`: from records to a library that can be shipped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder, checking, given_model, import_check, make, on_board
from farm.artifacts import manifest as artifact_manifest
from farm.artifacts import package as artifact_package
from farm.artifacts.runtime import inputs as runtime_inputs
from farm.campaign import plan_models, submit, tune
from farm.cli import options, output, tables
from farm.cli.campaign_options import CampaignScreen
from farm.cli.options import read_duration_s
from farm.errors import PermanentError, UsageError
from farm.inventory import board_types
from farm.search import gpus
from farm.search.graph import pipelines
from farm.settings import Settings
from farm.units import format_bytes, format_latency, format_number

if TYPE_CHECKING:
    from farm.artifacts.artifact_folder import Artifact
    from farm.artifacts.manifest import Manifest, SequenceLengths
    from farm.store import Store

LOCAL = "local"
_MOST_LABELS = 16 << 20
Folder = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A folder that `farm model compile` wrote.")]
Board = Annotated[
    str,
    typer.Option(
        "--board", metavar="NAME", help="Name of a board; local: this machine.", autocompletion=options.complete_board
    ),
]
MovedModel = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Path of the model, if it has moved.")]
Wait = Annotated[str, typer.Option("--wait", metavar="10m", help="Longest wait for a board.")]
Preferred = Annotated[
    str,
    typer.Option(metavar="POINT", help="Operating point whose records are preferred, as `farm record list` names it."),
]
AnyDevice = Annotated[
    str,
    typer.Option(
        metavar="cpu|gpu|both",
        help="Processor or GPU of the board; both: whichever has the whole model done sooner by records and "
        "predictions, copies counted, or the only one that code can be made for.",
    ),
]


@output.command
def compile_(
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the artifact; it is created.")],
    board_type: Annotated[
        str, typer.Option("--board-type", metavar="TYPE", help="Board type to compile for; default: local.")
    ] = "",
    board: Annotated[
        str,
        typer.Option("--board", metavar="NAME", help="Board to compile for, which says what type, and if --simulated."),
    ] = "",
    operating_point: Preferred = "default",
    missing: Annotated[
        str, typer.Option("--missing", metavar="rule|tune|refuse", help="Treatment of workloads without a record.")
    ] = "rule",
    trials: options.Trials = 128,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Compile for virtual boards of the type, from records made on them.")
    ] = False,
    device: AnyDevice = "cpu",
    exact: options.Exact = False,
    weights: options.Weights = "float32",
    labels: Annotated[
        Path | None,
        typer.Option("--classes", metavar="FILE", help="File with the names of a classifier's classes, one per line."),
    ] = None,
    shape: options.Shapes = None,
    batch: options.Batch = None,
    trust_model: options.TrustModel = False,
) -> output.Document:
    """Compile a model for a board type. With the best records there are, into a folder with library and manifest."""
    since = time.monotonic()

    if missing not in make.MISSING:
        raise UsageError(f"--missing {missing!r} is unknown", f"Known: {', '.join(make.MISSING)}.")
    options.require_trials(trials)
    settings = farm_settings.load()
    with options.open_store(settings) as store:
        chosen, for_virtual = _choose_type(store, board_type, board, simulated)
    own = pipelines.make_exact(chosen, exact)
    kinds = [pipelines.store_weights(gpus.require_device(own, each), weights) for each in gpus.list_devices(device)]
    artifact_folder.require_place(out)
    found = given_model.open_model(model, shape or (), batch, trust_model)
    found.source.require_float(weights)
    orders = [
        make.CompileOrder(found, kind, operating_point, for_virtual, missing, read_labels(labels)) for kind in kinds
    ]
    with options.open_store(settings) as store:
        if missing == make.TUNE:
            for order in orders:
                _tune(order, settings, store, trials, since)
        output.note(f"compiling {found.about.name} for {own.name}; big models take minutes")
        if len(orders) > 1:
            artifact = make.make_faster(orders, out, settings, store, output.note)
        else:
            artifact = make.make_artifact(orders[0], out, settings, store, output.note)
    yield from _show(artifact, since, board)


@output.command
def verify(
    folder: Folder,
    board: Board = LOCAL,
    inputs: Annotated[
        list[Path] | None,
        typer.Option("--input", metavar="X.npz", help="Inputs to check in place of seeded ones; repeatable."),
    ] = None,
    model: MovedModel = None,
    wait: Wait = "60s",
) -> output.Document:
    """Compare an artifact's outputs on a board with ONNX Runtime's. Exit code 1 where they differ."""
    artifact = artifact_folder.open_artifact(folder)
    artifact.require_whole()
    wait_s = read_duration_s("--wait", wait)
    opened = given_model.reopen_model(artifact.manifest, model)
    with given_model.refusing():
        given = [(str(path), runtime_inputs.read_arrays(path)) for path in inputs or ()]
    cases = checking.make_cases(opened, artifact.manifest, given)
    settings = farm_settings.load()
    on_board.prepare_gpu(artifact.manifest, settings)
    with (
        options.open_store(settings) as store,
        on_board.hold_board(
            settings, store, board, wait_s, f"verify {artifact.manifest.name}", output.note, is_timed=False
        ) as held,
    ):
        verified = checking.verify_artifact(artifact, held, opened.source, cases)
    wrong = None
    if not verified.matches:
        wrong = PermanentError(
            f"{artifact.manifest.name} computes something else on {verified.board}: {verified.reason}",
            f"It cannot be packaged. {_advise(artifact.manifest, opened, cases)}",
        )
    yield output.Failed(verified.model_dump(mode="json"), wrong)
    off = "no number" if verified.max_rel_error is None else f"{verified.max_rel_error:.1e} of the peak"
    if (halved := artifact.manifest.weights.workloads) and verified.rms_rel_error is not None:
        off += f", root mean square {verified.rms_rel_error:.1e} (weights of {halved} workloads in 16 bits)"
    said = "agrees with" if verified.matches else "DOES NOT AGREE with"
    output.say(
        f"{artifact.manifest.name} on {verified.board} {said} {verified.reference}: largest error {off}, "
        f"{len(verified.inputs)} inputs"
    )


@output.command
def package(
    folder: Folder,
    form: Annotated[str, typer.Option("--format", metavar="tar|wheel|c", help="Format to write.")] = "wheel",
    out: Annotated[
        # No Path, which would forget the slash at the end of a folder's name.
        str | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Folder, made if need be, or file (NAME.tar, or a wheel's name); default: the current folder.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the Python package; default: the model's.")
    ] = None,
    runtime: Annotated[
        Path | None,
        typer.Option(
            "--runtime", metavar="BUNDLE|DIR", help="Bundle or folder with TVM's runtime for the board (format c)."
        ),
    ] = None,
) -> output.Document:
    """Pack a verified artifact into one file. One that was not verified, or was changed since, is refused."""
    farm_settings.load().share_linker_cache()
    artifact = artifact_folder.open_artifact(folder)
    path = artifact_package.write_package(artifact, form, out, name, runtime)
    if name is None and (why := artifact_package.explain_name(artifact.manifest.name)):
        output.note(why)
    yield {"package": str(path), "format": form, "bytes": path.stat().st_size}
    output.stdout.print(f"{path} ({format_bytes(path.stat().st_size)})", soft_wrap=True, markup=False)


def _advise(manifest: Manifest, opened: Any, cases: Any) -> str:
    """What to do about an artifact that computes something else: it depends on whether the import does, too."""
    output.note("comparing the model without schedules with ONNX Runtime")
    named = str(manifest.verified.reason if manifest.verified else "").rpartition(": ")[0]
    chosen = [case for case in cases if case[0] == named] or cases
    found = import_check.compare_import(opened.source, opened.inputs, chosen, output.note)
    if found is not None and not found.matches:
        return import_check.IMPORT_HINT
    used = artifact_folder.list_options(manifest.pipeline)
    less = [] if "--exact" in used else ["with --exact"]
    less += ["without --weights"] if "--weights" in used else []
    if less:
        return f"The model without schedules is right. Compile it again {' and '.join(less)}."
    if manifest.count("record"):
        return "The model without schedules is right: forget its records (`farm record prune`) and compile it again."
    return "The model without schedules is right: its compiled code is at fault. Report it."


def _choose_type(store: Store, board_type: str, board: str, simulated: bool) -> tuple[board_types.BoardType, bool]:
    """What is compiled for, and whether for virtual boards of the type. Raises UsageError."""
    if not board:
        kind = board_types.require_board_type(board_type or LOCAL)
        own = [row for row in store.boards.fetch() if row.board_type == kind.name]
        if own and not simulated and all(row.simulated for row in own):
            output.note(
                f"for real boards of type {kind.name}; those of this farm are virtual: --simulated compiles for them, "
                "from their records"
            )
        return kind, simulated
    kind, known = on_board.find_board(store, board)
    is_virtual = known is not None and store.boards.require(known).simulated
    if board_type not in ("", kind.name):
        raise UsageError(f"board {board} is no {board_type} but a {kind.name}", "Leave out --board-type.")
    if simulated and not is_virtual:
        raise UsageError(f"board {board} is a real one", "Leave out --simulated.")
    return kind, is_virtual


def read_labels(path: Path | None) -> bytes | None:
    """Return the text of a file of class names; None without a file. Raises UsageError."""
    if path is None:
        return None
    with given_model.refusing(), runtime_inputs.reading(path, "UTF-8 text", _MOST_LABELS) as file:
        return "\n".join(file.read().decode("utf-8-sig").splitlines()).encode() + b"\n"


def _tune(order: Any, settings: Settings, store: Store, trials: int, since: float) -> None:
    """Tune what has no record of its own board type, as `farm tune` does."""
    screen = CampaignScreen()
    model, *others = plan_models.to_variants(order.opened)
    request = submit.OneModelRequest(
        "compile", model, order.board_type, trials, simulated=order.simulated, only_unknown=True, others=tuple(others),
        since=since,
    )  # fmt: skip
    try:
        import_check.require_right_import(order.opened.source, order.opened.inputs, screen.note)
        tune.tune(request, settings, store, screen)
    finally:
        screen.close()


def _show(artifact: Artifact, since: float, board: str = "") -> output.Document:
    manifest = artifact.manifest
    yield {"artifact": str(artifact.folder), **manifest.model_dump(mode="json")}
    tables.print_table(
        ("Workload", "Algorithm", "Weight", "Scheduled by", "Latency (us)"),
        [
            (
                each.name,
                each.algorithm or None,
                each.weight,
                _say_source(manifest, each),
                None
                if each.latency_s is None
                else f"{'~' * (each.source != 'record')}{format_number(each.latency_s * 1e6)}",
            )
            for each in manifest.workloads
        ],
        left=(0, 1, 3),
        empty="no workloads",
    )
    estimated = len(manifest.workloads) - manifest.count("record")
    mark = "~" if estimated else ""
    summed = "unknown"
    if manifest.predicted_latency_s is not None:
        summed = f"{mark}{format_latency(manifest.predicted_latency_s)}"
    board = board or (LOCAL if manifest.board_type == LOCAL else "NAME")
    lines = [
        f"{manifest.name} for {manifest.board_type}{' (simulated)' if manifest.simulated else ''}: "
        f"{manifest.count('record')} of {len(manifest.workloads)} workloads from records, "
        f"{manifest.count('rule')} by the rule; latency summed over them {summed}",
        f"{artifact.folder}: {format_bytes(manifest.library.bytes)}, {time.monotonic() - since:.0f} s",
        f"`farm model verify {artifact.folder} --board {board}` checks what it computes",
    ]
    if gpu := manifest.gpu:
        lines[0] = (
            f"{manifest.name} for the GPU of {manifest.board_type} ({gpu.arch}, PTX {gpu.ptx})"
            f"{' (simulated)' if manifest.simulated else ''}: {gpu.kernels} kernels; at most {gpu.registers} "
            f"registers and {gpu.spilled_bytes} spilled bytes per thread, {gpu.shared_bytes} shared bytes per block"
        )
    if manifest.lengths is not None:
        lines.insert(1, _say_lengths(manifest.lengths))
    if estimated:
        lines.insert(1, "~: estimated from facts of the board type's core, not measured")
    if manifest.weights.asked != artifact_manifest.FLOAT32:
        lines.insert(2, _say_weights(manifest))
    if manifest.devices:
        lines.insert(1, f"taken for the {manifest.device}: {_say_devices(manifest)}")
    for device, why in manifest.not_made.items():
        lines.insert(1, f"taken for the {manifest.device}, since no code was made for the {device}: {why}")
    output.say(*lines)


def _say_lengths(lengths: SequenceLengths) -> str:
    """The range of lengths and the compiled sizes."""
    sizes = [str(each.size) for each in lengths.sizes]
    takes = f"takes {lengths.least} to {sizes[-1]} {lengths.name}, padded to {', '.join(sizes)}"
    return f"{takes}; its workloads are those of {sizes[-1]}"


def _say_weights(manifest: Manifest) -> str:
    """Whose weights are in 16 bits, and what that saves, for people."""
    weights, of = manifest.weights, len(manifest.workloads)
    if pipelines.require_pipeline(manifest.pipeline).weights != weights.asked:
        return (
            "all weights are float32: the model went through the graph pipeline "
            f"{manifest.pipeline}, which stores none in 16 bits"
        )
    if not weights.workloads and weights.asked == pipelines.BF16_ALL:
        return "all weights are float32: no workload has any that can be in 16 bits"
    if not weights.workloads:
        return (
            "all weights are float32: no workload is predicted to gain by 16 bits (--weights bf16-all takes all that "
            "can be)"
        )
    if weights.asked == pipelines.FP16:
        return (
            f"{weights.workloads} of {of} workloads compute in 16 bits; weights take {weights.bytes / 1e6:.1f} MB in "
            f"place of {2 * weights.bytes / 1e6:.1f}; `farm model verify` says what error that makes"
        )
    return (
        f"weights of {weights.workloads} of {of} workloads are in 16 bits: {weights.bytes / 1e6:.1f} MB in place of "
        f"{2 * weights.bytes / 1e6:.1f}; `farm model verify` says what error that makes"
    )


def _say_devices(manifest: Manifest) -> str:
    """What each device was expected to take, for people."""
    return ", ".join(
        f"{device} {each.latency_s * 1e3:.3f} ms ({each.measured} of {each.workloads} workloads measured"
        + (f", copies {each.copies_s * 1e3:.3f} ms)" if each.copies_s else ")")
        for device, each in manifest.devices.items()
    )


def _say_source(manifest: Manifest, workload: Any) -> str:
    used = workload.record
    if used is None:
        return {"rule": "rule (predicted)"}.get(workload.source, "TVM's own code")
    imported = "imported " if used.imported else ""
    if used.fit == "exact":
        return f"{imported}record"
    return (
        f"{imported}record at {used.operating_point}"
        if used.board_type == manifest.board_type
        else f"{imported}record of {used.board_type}"
    )
