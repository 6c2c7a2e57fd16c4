"""Run the model of this package on an image or an .npz: `python -m PACKAGE cat.jpg`."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import images
from .inputs import InputError, describe, read_arrays
from .runner import Model


def main(arguments: list[str] | None = None) -> int:
    """Do it; returns the exit code: 2 for input that cannot be taken, 1 where the model does not run."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("input", type=Path, help="an image, or an .npz with an array for every input")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run it so often and time it")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="default: as compiled for")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes to print")
    parser.add_argument("--out", type=Path, metavar="Y.npz", help="write the outputs there")
    options = parser.parse_args(arguments)
    if options.repeat < 1 or options.top < 1 or (options.threads is not None and options.threads < 1):
        parser.error("--repeat, --threads and --top must be at least 1")
    try:
        model = Model(options.threads)
        task = model.manifest["task"]
        inputs = _read(options.input, model, task)
        latencies_s = []
        for _ in range(options.repeat):
            outputs = model.run(inputs)
            latencies_s.append(model.last_latency_s or 0.0)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.out:
        np.savez(options.out, **outputs)  # type: ignore[arg-type]
    _print(model, task, outputs, options.top)
    print(f"{statistics.median(latencies_s) * 1e3:.3f} ms per inference, median of {len(latencies_s)}, "
          f"{model.threads} threads; preparing the input and reading the output not counted")  # fmt: skip
    return 0


def _read(path: Path, model: Model, task: dict[str, Any]) -> dict[str, Any]:
    if path.suffix.lower() == ".npz":
        return read_arrays(path)
    if task.get("kind") != "classifier":
        takes = ", ".join(describe(each["name"], each["shape"], each["dtype"]) for each in model.inputs)
        raise InputError(f"this model takes no image but an .npz with {takes}")
    return images.prepare(images.read_image(path, len(task["mean"])), task)


def _print(model: Model, task: dict[str, Any], outputs: dict[str, Any], count: int) -> None:
    if task.get("kind") == "classifier":
        labels_path = model.folder / "labels.txt"
        labels = labels_path.read_text(encoding="utf-8").splitlines() if labels_path.is_file() else []
        for index, label, share in images.rank(outputs[task["output"]], labels, count):
            print(f"{100 * share:6.2f} %  {index:5d}  {label}")
        return
    for name, array in outputs.items():
        print(describe(name, array.shape, str(array.dtype)))


if __name__ == "__main__":
    sys.exit(main())
