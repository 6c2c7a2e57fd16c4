"""`farm model deploy`, `run` and `bench`: artifacts on boards."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from device_agent.protocol import GPU
from farm import settings as farm_settings
from farm import values
from farm.artifacts import artifact_folder, checking, given_model, on_board, package
from farm.artifacts import bench as benching
from farm.artifacts.runtime import tasks
from farm.cli import board_remote, options, output, tables
from farm.cli import result as result_cli
from farm.cli.model_artifacts import Board, Folder, Wait
from farm.cli.options import read_duration_s
from farm.connectivity import host_keys, ssh, ssh_config
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import describe_watts
from farm.points import requests
from farm.points import values as point_values
from farm.report import model_pages
from farm.units import format_bytes
from farm.values import BENCH, RUN

PerLayer = Annotated[
    bool, typer.Option("--per-layer", help="Show what each function takes, watched in runs after the timed ones.")
]
Point = Annotated[
    str, typer.Option("--operating-point", metavar="POINT", help="Clocks to hold, such as mode=MAXN or a57=921.6MHz.")
]


def print_layers(name: str, layers: Sequence[Mapping[str, Any]], median_s: float) -> None:
    """Print the functions in execution order, each with its share of an inference."""
    if not layers:
        output.say(f"{name}: what its functions take is not known: only code of TVM's on a processor is watched")
        return
    tables.print_table(
        ("Function", "Calls", "Time (us)", "Share"),
        [
            (each["name"], each["calls"], f"{each['latency_s'] * 1e6:,.1f}", f"{each['latency_s'] / median_s:.1%}")
            for each in layers
        ],
        left=(0,),
    )
    rest_s = median_s - sum(each["latency_s"] for each in layers)
    output.say(f"{name}: {max(0.0, rest_s) / median_s:.1%} of {median_s * 1e3:.3f} ms is none of theirs")


@output.command
def deploy(folder: Folder, board: Board = "local", wait: Wait = "60s") -> output.Document:
    """Put a verified artifact on a board. As a Python package that the board's TVM runtime runs."""
    artifact = artifact_folder.open_artifact(folder)
    checking.require_verified(artifact)
    if why := package.explain_name(artifact.manifest.name).partition(";")[0]:
        output.note(why)
    wait_s = read_duration_s("--wait", wait)
    settings = farm_settings.load()
    settings.share_linker_cache()
    on_board.prepare_gpu(artifact.manifest, settings)
    purpose = f"deploy {artifact.manifest.name}"
    with (
        options.open_store(settings) as store,
        on_board.hold_board(settings, store, board, wait_s, purpose, output.note, is_timed=False) as held,
    ):
        held.require_fit(artifact.manifest)
        _, known = on_board.find_board(store, board)
        transport = board_remote.fetch_transport(store, known) if known else None
        if isinstance(transport, values.Ssh):
            known_hosts = host_keys.KnownHosts(settings.home_path / host_keys.FILE_NAME)
            with ssh.SshConnection.connect(ssh_config.to_ssh_address(transport), known_hosts) as connection:
                done = package.deploy_over_ssh(artifact, connection)
        else:
            done = package.deploy_here(artifact, settings.home_path / "models" / held.name)
        name = held.name
        command = done.command
        if isinstance(transport, values.Virtual):  # its code is the board's, not this machine's
            command = shlex.join(["farm", "model", "run", str(folder), "--board", name, "--input"])
    yield (
        {
            "board": name,
            "package": done.package,
            "folder": done.folder,
            "command": command,
            "bytes": done.bytes,
            "sent_bytes": done.sent_bytes,
        }
    )
    output.say(
        f"{done.package} is on {name} in {done.folder} ({_say_sent(done.bytes, done.sent_bytes)})",
        f"{'there' if done.sent_bytes is not None else 'here'}: {command} INPUT",
    )


@output.command
def run(
    folder: Folder,
    inputs: Annotated[
        Path,
        typer.Option("--input", metavar="X.npz|CAT.jpg", help="Inputs: an npz file of arrays by name, or an image."),
    ],
    board: Board = "local",
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Number of timed runs.")] = 10,
    out: Annotated[Path | None, typer.Option("--out", metavar="Y.npz", help="File for the outputs (npz).")] = None,
    operating_point: Point = "default",
    per_layer: PerLayer = False,
    wait: Wait = "60s",
) -> output.Document:
    """Run an artifact on a board. On an input of yours: latency, energy, and for a classifier the best classes.

    Exit code 1 where `farm model verify` found its outputs wrong.
    """
    if out is not None:
        artifact_folder.require_room(out.parent)
    artifact = artifact_folder.open_artifact(folder)
    artifact.require_whole()
    manifest = artifact.manifest
    arrays, scale = checking.read_input(manifest, inputs)
    point = requests.parse_point(operating_point)
    wait_s = read_duration_s("--wait", wait)
    settings = farm_settings.load()
    on_board.prepare_gpu(manifest, settings)
    with (
        options.open_store(settings) as store,
        on_board.hold_board(settings, store, board, wait_s, f"run {manifest.name}", output.note) as held,
    ):
        held.require_fit(manifest)
        held.pin(point, operating_point)
        ran = checking.run_artifact(artifact, held, arrays, repeat, per_layer)
        document: dict[str, Any] = {
            "artifact": str(folder),
            **ran.measured.model_dump(mode="json"),
            "outputs": {name: list(array.shape) for name, array in ran.outputs.items()},
            "out": str(out) if out else None,
            "found": checking.find(artifact, ran.outputs, 5, scale),
            "device": manifest.device,
            "bytes": manifest.library.bytes,
            "precision": manifest.weights.asked,
            "layers": ran.layers,
            "doubt": ran.doubt,
            "fps": (manifest.model.batch or 1) / ran.measured.latency["median"],
        }
        board_facts = {"name": ran.measured.board, "type": ran.measured.board_type, "simulated": ran.measured.simulated}
        result_cli.keep(store, RUN, document, model=manifest.name, board=board_facts, device=manifest.device)
    if out is not None:
        checking.write_outputs(ran.outputs, out)
    yield output.Failed(document, checking.find_fault(manifest))
    _print_run(document)
    if per_layer:
        print_layers(manifest.name, ran.layers, document["latency"]["median"])


@output.command
def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL|ARTIFACT…", help="Models or artifacts.")],
    board: Board = "local",
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="NAME,…", help="onnxruntime, ncnn, pytorch, tflite, tensorrt, rule, untuned."
        ),
    ] = "onnxruntime,rule,untuned",
    operating_point: Point = "default",
    device: options.Device = "cpu",
    shape: options.Shapes = None,
    batch: Annotated[str, typer.Option("--batch", metavar="1,2,4,…", help="Batch sizes to time, one by one.")] = "",
    instances: Annotated[
        int, typer.Option("--instances", metavar="N", min=1, help="Processes of each program at once; threads divided.")
    ] = 1,
    per_layer: PerLayer = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for charts and figures.")] = None,
    wait: Wait = "60s",
) -> output.Document:
    """Time models beside other engines. In turns on a board, with untuned code; exit code 1 where outputs are wrong."""
    others = benching.read_rivals(against)
    point = requests.parse_point(operating_point)
    wait_s = read_duration_s("--wait", wait)
    if out is not None:
        artifact_folder.require_room(out)
    batches = benching.read_batches(batch)
    subjects = [read_subject(text, shape, device, each) for text in models for each in batches]
    settings = farm_settings.load()
    for subject in subjects:
        if subject.artifact is not None:
            on_board.prepare_gpu(subject.artifact.manifest, settings)
    with (
        options.open_store(settings) as store,
        on_board.hold_board(settings, store, board, wait_s, "bench", output.note) as held,
    ):
        held.pin(point, operating_point)
        kind, _ = on_board.find_board(store, board)
        document, _ = benching.bench(subjects, held, kind, others, settings, store, output.note, per_layer, instances)
        for model in document["models"]:
            kept = {**document, "models": [model]}
            result_cli.keep(store, BENCH, kept, model=model["model"], board=document["board"], device=model["device"])
    if out is not None:
        document["report"] = model_pages.write_bench_report(document, out)
    wrong = [
        f"{model['model']}, {each['label']}: {each['reason']}"
        for model in document["models"]
        for name, each in model["variants"].items()
        if each.get("matches") is False and name not in benching.ENGINES
    ]
    error = PermanentError(f"not all compute what ONNX Runtime does: {'; '.join(wrong)}") if wrong else None
    yield output.Failed(document, error)
    _print_bench(document)
    for model in document["models"] if per_layer else ():
        for each in model["variants"].values():
            if each["latency_s"] is not None and each["layers"]:
                print_layers(f"{model['model']}, {each['label']}", each["layers"], each["latency_s"]["median"])


def _say_sent(size: int, sent: int | None) -> str:
    """Say the deployed size, and how much of it was sent to the board."""
    if sent is None or sent == size:
        return format_bytes(size) + (" sent" if sent else "")
    return (
        f"{format_bytes(size)}, of which {format_bytes(sent)} sent" if sent else f"{format_bytes(size)}, there already"
    )


def read_subject(text: str, shape: list[str] | None, device: str, batch: int | None = None) -> Any:
    """Return what is timed: a model, or an artifact. Raises UsageError."""
    if artifact_folder.is_artifact(Path(text)):
        if batch is not None:
            raise UsageError(f"--batch: the artifact {text} has its own batch size", "Give the model instead.")
        artifact = artifact_folder.open_artifact(Path(text))
        artifact.require_whole()
        return benching.Subject(given_model.reopen_model(artifact.manifest, None), artifact.manifest.device, artifact)
    if Path(text).is_dir():
        raise UsageError(f"{text} is a folder without a manifest", "Give a model, or what `farm model compile` wrote.")
    return benching.Subject(given_model.open_model(text, shape or (), batch), device)


def _print_run(document: dict[str, Any]) -> None:
    if document["doubt"]:
        output.say(f"do not rely on this latency, {document['doubt']}")
    figures = {key: value * 1e3 for key, value in document["latency"].items() if key != "count"}
    tables.print_table(
        ("Latency (ms)", "Median", "95 % CI", "p90", "p99", "Mean", "Min", "Max", "Std", "FPS", "Energy (mJ)"),
        [
            (
                f"{document['board_type']}/{document['board']}",
                f"{figures['median']:.3f}",
                f"{figures['ci_low']:.3f} – {figures['ci_high']:.3f}",
                *(f"{figures[key]:.3f}" for key in ("p90", "p99", "mean", "min", "max", "std")),
                f"{document['fps']:,.1f}",
                None if document["energy_j"] is None else f"{document['energy_j'] * 1e3:.2f}",
            )
        ],
    )
    watts = "" if document["energy_j"] is None else f", {describe_watts(document['board_type'])}"
    simulated = f"; simulated{watts}: nothing was measured on a real board" if document["simulated"] else ""
    if document["simulated"] and document["device"] == GPU:
        simulated = "; simulated: a model gave these times, which no GPU was ever compared with"
    conditions = point_values.format_conditions(document["threads"], document["clocks"], document["operating_point"])
    lines = [f"{document['latency']['count']:.0f} runs, {conditions}{simulated}", _say_details(document)]
    lines += tasks.say(document["found"])
    lines += [f"outputs: {document['out']}"] if document["out"] else []
    output.say(*lines)


def _say_details(document: dict[str, Any]) -> str:
    """Say the first inference, the peak of memory, and the size, as far as they are known."""
    first_s, peak = document["first_s"], document["peak_memory_bytes"]
    said = [f"first inference {first_s * 1e3:.3f} ms"] if first_s is not None else []
    said += [f"peak memory {format_bytes(peak)}, with Python and TVM's runtime"] if peak is not None else []
    return "; ".join([*said, f"library {format_bytes(document['bytes'])}"])


def _print_bench(document: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = []
    notes = []
    for model in document["models"]:
        if model["doubt"]:
            output.say(f"do not rely on the latencies of {model['model']}, {model['doubt']}")
        called = model["model"] + (f" ({model['artifact']})" if model["artifact"] else "")
        called += f", batch {model['batch']}" if model["batch"] > 1 else ""
        called += " on the GPU" if model["device"] == GPU else ""
        for each in model["variants"].values():
            figures = each["latency_s"]
            if figures is None:
                rows.append((called, each["label"], "not timed", *[None] * 11))
                notes.append(f"{called}, {each['label']}: {each['reason']}")
                continue
            if each["instances_s"]:
                together = ", ".join(f"{each_s * 1e3:.3f}" for each_s in each["instances_s"])
                notes.append(f"{called}, {each['label']}: medians of the instances {together} ms")
            rows.append(
                (
                    called,
                    f"{each['label']} {each['version']}".rstrip(),
                    f"{figures['median'] * 1e3:.3f}",
                    f"{figures['ci_low'] * 1e3:.3f} – {figures['ci_high'] * 1e3:.3f}",
                    f"{figures['p90'] * 1e3:.3f}",
                    f"{figures['p99'] * 1e3:.3f}",
                    None if each["first_s"] is None else f"{each['first_s'] * 1e3:.3f}",
                    f"{each['fps']:,.1f}",
                    f"{each['ratio']:.2f}",
                    None if each["energy_j"] is None else f"{each['energy_j'] * 1e3:.2f}",
                    None if each["peak_memory_bytes"] is None else format_bytes(each["peak_memory_bytes"]),
                    format_bytes(each["bytes"]),
                    each["precision"],
                    "yes" if each["matches"] else "NO",
                )
            )
    tables.print_table(
        (
            *("Model", "Code", "Median (ms)", "95 % CI", "p90", "p99", "First", "FPS", "Times ours", "Energy (mJ)"),
            *("Memory", "Size", "Precision", "Right"),
        ),
        rows,
        left=(0, 1),
        spare=("First", "p90", "Memory", "Size", "95 % CI", "p99"),
    )
    board = document["board"]
    simulated = f" (simulated, {board['watts']}: nothing was measured on a real board)" if board["simulated"] else ""
    notes.append(
        f"{board['type']}/{board['name']}{simulated}, "
        f"{point_values.format_conditions(document['threads'], document['clocks'], document['operating_point'])}; "
        + (f"{document['instances']} instances at once; " if document["instances"] > 1 else "")
        + document["runs"]
    )
    notes += [
        f"{name}: the greatest batch for the memory of {board['name']} is about {most:,}"
        for name, most in document["greatest_batch"].items()
    ]
    notes += [f"report: {path}" for path in document.get("report", ())]
    output.say(*notes)
