"""Run a notebook's cells in order, in the FARM_HOME of the environment: `notebook.py FILE.ipynb [--write]`.

Plain Python, no kernel: a cell shows what it prints and the figures that it leaves open. With --write the file gets
these as its outputs, without times or counters, so that equal runs make equal files.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import pathlib
from collections.abc import Iterator
from typing import Any


def run(notebook: dict[str, Any]) -> None:
    """Execute all cells of code in one namespace and put what they show in their place. A cell's error is raised."""
    import matplotlib as mpl

    mpl.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(each for each in notebook["cells"] if each["cell_type"] == "code"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number + 1}", "exec"), names)  # noqa: S102 - a notebook of ours
        cell["outputs"] = [*_show_text(printed.getvalue()), *_show_figures()]


def _show_text(text: str) -> Iterator[dict[str, Any]]:
    if text:
        yield {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def _show_figures() -> Iterator[dict[str, Any]]:
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        image = io.BytesIO()
        # Without the version and the time, which say nothing.
        pyplot.figure(number).savefig(image, format="png", dpi=110, metadata={"Software": None})
        data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["a figure"]}
        yield {"output_type": "display_data", "data": data, "metadata": {}}
    pyplot.close("all")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("--write", action="store_true", help="put what the cells show into the file")
    options = parser.parse_args()
    notebook = json.loads(options.notebook.read_text(encoding="utf-8"))
    run(notebook)
    if options.write:
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        options.notebook.write_text(text + "\n", encoding="utf-8")
    else:
        print(json.dumps([cell.get("outputs", []) for cell in notebook["cells"]]))


if __name__ == "__main__":
    main()
