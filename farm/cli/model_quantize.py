"""`farm model quantize`: a model in 8 bits, and what that costs in accuracy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from farm.artifacts import calibration as calibrations
from farm.cli import options, output, tables
from farm.errors import UsageError
from farm.models import quantise


def register(app: typer.Typer) -> None:
    """Put the command beside the other ones of `farm model`."""
    app.command("quantize")(quantize)


@output.command
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or a name from `farm model zoo`.")],
    calibration: Annotated[
        str,
        typer.Option("--calibration", metavar="DIR|random", help="A folder of .npz or .npy inputs, or `random` ones."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Path of the ONNX file to write.")],
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", min=1, help="Number of inputs where they are random.")
    ] = 16,
    shape: options.Shapes = None,
    batch: options.Batch = None,
) -> output.Document:
    """Write a model in 8 bits. QDQ, weights per channel; shows how far its outputs are from the float model's."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder", "Give the name of a file.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.absolute().parent}")
    source, inputs = options.read_model(model, shape, batch)

    given = calibrations.read_calibration(calibration, inputs, examples)
    done = quantise.quantise(source, given)
    partly = out.with_name(f".{out.name}.part")
    try:
        partly.write_bytes(done.onnx_bytes)
        partly.replace(out)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    finally:
        partly.unlink(missing_ok=True)
    before, after = len(source.onnx_bytes), len(done.onnx_bytes)
    yield (
        {
            "model": source.name,
            "out": str(out),
            "bytes_before": before,
            "bytes": after,
            "examples": done.examples,
            "random": calibration == calibrations.RANDOM,
            "losses": [dataclasses.asdict(loss) for loss in done.losses],
        }
    )
    tables.print_table(
        ("Output", "Error (RMS)", "Largest error", "Same top 1"),
        [
            (
                loss.output,
                f"{100 * loss.rms:.2f} %",
                f"{100 * loss.largest:.2f} %",
                None if loss.top1 is None else f"{100 * loss.top1:.1f} %",
            )
            for loss in done.losses
        ],
    )
    kind = "random inputs" if calibration == calibrations.RANDOM else "inputs"
    sizes = f"{after:,} bytes, was {before:,}"
    output.say(f"{out}: {sizes}; calibrated and compared on {done.examples} {kind}")
    if calibration == calibrations.RANDOM:
        output.stderr.print("Random inputs calibrate for a try; give real ones before shipping.", soft_wrap=True)
