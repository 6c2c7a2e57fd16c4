"""Run the model of this package on an image or an .npz: `python -m PACKAGE cat.jpg`, or `python FOLDER cat.jpg`."""

from __future__ import annotations

import argparse
import importlib
import io
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Started by its folder, which is then first on the path; the package is in the parent folder.
    _folder = Path(__file__).absolute().parent
    sys.path[0], __package__ = str(_folder.parent), _folder.name
    importlib.import_module(__package__)

from . import tasks
from .inputs import InputError, describe, write_arrays
from .runner import Model


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit code: 2 for invalid input, 1 where the model does not run."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("input", type=Path, help="an image, or an .npz with an array for every input")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run it so often and time it")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="default: as compiled for")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes to print")
    parser.add_argument("--out", type=Path, metavar="Y.npz", help="write the outputs there")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # labels may have characters that the terminal lacks
    if options.repeat < 1 or options.top < 1 or (options.threads is not None and options.threads < 1):
        parser.error("--repeat, --threads and --top must be at least 1")
    try:
        model = Model(options.threads)
        inputs, scale = tasks.read_input(options.input, model.manifest)
        latencies_s = []
        for _ in range(options.repeat):
            outputs = model.run(inputs)
            latencies_s.append(model.last_latency_s or 0.0)
        if options.out:
            with options.out.open("wb") as file:
                write_arrays(file, outputs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print(model, outputs, options.top, scale)
    print(f"{statistics.median(latencies_s) * 1e3:.3f} ms per inference, median of {len(latencies_s)}, "
          f"{model.threads} threads; preparing the input and reading the output not counted")  # fmt: skip
    return 0


def _print(model: Model, outputs: dict[str, Any], count: int, scale: float) -> None:
    path = model.folder / "labels.txt"
    labels = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if model.manifest["task"]["kind"] in (tasks.CLASSIFIER, tasks.DETECTOR):
        found = tasks.find(outputs, model.manifest["task"], labels, count, scale)
        lines = tasks.say(found) or ["nothing found"]
    else:
        lines = [describe(name, array.shape, str(array.dtype)) for name, array in outputs.items()]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
