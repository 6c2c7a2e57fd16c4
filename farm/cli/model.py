"""`farm model`: what a model is made of."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from farm.cli import model_artifacts, model_board, model_quantize, options, output
from farm.inventory.board_types import require_board_type
from farm.models import zoo

app = typer.Typer(help="Models: the zoo, and what is in one.", no_args_is_help=True)
model_artifacts.register(app)
model_board.register(app)
model_quantize.register(app)


@app.command("zoo")
def list_zoo(json: options.Json = False, debug: options.Debug = False) -> None:
    """List the models that come with the farm: real topologies, seeded random weights."""

    def work() -> None:
        rows: list[dict[str, Any]] = [
            {
                "name": model.name,
                "description": model.description,
                "inputs": {name: list(shape) for name, shape in model.input_shapes.items()},
                "outputs": {name: list(shape) for name, shape in model.output_shapes.items()},
                "parameters": model.parameters,
                "flop": model.flop,
                "published": model.published or None,
            }
            for model in zoo.ZOO.values()
        ]
        if json:
            output.print_json(rows)
            return
        output.print_table(
            ("Name", "Parameters", "GFLOP", "Inputs", "Description"),
            [
                (
                    r["name"],
                    f"{r['parameters']:,}",
                    f"{r['flop'] / 1e9:.3g}",
                    ", ".join(f"{n} {_shape(s)}" for n, s in r["inputs"].items()),
                    r["description"],
                )
                for r in rows
            ],
            left=(0, 3, 4),
        )

    output.run(work, debug)


@app.command("show")
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or a name from `farm model zoo`.")],
    board_type: Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Whose target to use.")] = "local",
    shape: options.Shapes = None,
    batch: options.Batch = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show a model's inputs and its workloads with FLOP, as `farm tune` would see them."""

    def work() -> None:
        kind = require_board_type(board_type)
        source, inputs = options.read_model(model, shape, batch)
        # Imported here: TVM takes a second that wrong usage should not wait for.
        from farm.campaign.survey import survey_model
        from farm.search.default_schedule import describe_default

        workloads, pipeline = survey_model(source, inputs, kind)
        families = [describe_default(workload) for workload in workloads]
        total = math.fsum(w.flop * w.weight for w in workloads)
        if json:
            output.print_json(
                {
                    "model": source.name,
                    "sha256": source.sha256,
                    "inputs": [{"name": i.name, "shape": list(i.static_shape), "dtype": i.dtype} for i in inputs],
                    "pipeline": pipeline,
                    "flop": total,
                    "workloads": [
                        {
                            "hash": w.hash,
                            "name": w.name,
                            "kind": w.kind,
                            "family": family,
                            "flop": w.flop,
                            "weight": w.weight,
                        }
                        for w, family in zip(workloads, families, strict=True)
                    ],
                }
            )
            return
        output.stdout.print(f"{source.name} ({source.origin})", soft_wrap=True, markup=False)
        for spec in inputs:
            output.stdout.print(
                f"input {spec.name}: {_shape(spec.static_shape)} {spec.dtype}", soft_wrap=True, markup=False
            )
        output.print_table(
            ("ID", "Name", "Schedule family", "FLOP", "Weight", "Share", "Workload"),
            [
                (
                    i,
                    w.name,
                    family,
                    f"{w.flop:,.0f}",
                    w.weight,
                    f"{100 * w.flop * w.weight / total:.1f} %" if total else None,
                    w.hash,
                )
                for i, (w, family) in enumerate(zip(workloads, families, strict=True))
            ],
            left=(1, 2, 6),
            empty="no tunable workloads",
        )
        output.stdout.print(
            f"{len(workloads)} workloads, {total / 1e9:.3f} GFLOP per inference, graph pipeline {pipeline}"
        )

    output.run(work, debug)


def _shape(shape: object) -> str:
    return "x".join(map(str, shape))  # type: ignore[call-overload]
