"""Compile a model in several precisions, to compare what each computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farm.artifacts import make
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.given_model import GivenModel
from farm.errors import FarmError, PermanentError, UsageError
from farm.inventory.board_types import BoardType
from farm.models import quantise
from farm.search.graph import pipelines
from farm.settings import Settings
from farm.store import Store

INT8 = "int8"


def read_precisions(text: str) -> list[str]:
    """Parse names such as `float32,int8`. Raises UsageError."""
    known = (*pipelines.KNOWN, INT8)
    wanted = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not wanted or (unknown := [word for word in wanted if word not in known]):
        raise UsageError(f"--weights: there is no {unknown[0] if wanted else text!r}", f"Known: {', '.join(known)}.")
    return wanted


def make_variants(
    opened: GivenModel,
    kind: BoardType,
    simulated: bool,
    precisions: Sequence[str],
    labels: bytes | None,
    calibration: Callable[[], Sequence[Any]],
    folder: Path,
    settings: Settings,
    store: Store,
    say: Callable[[str], None],
) -> tuple[dict[str, Artifact], dict[str, str]]:
    """Compile each precision into a folder of its own; return the artifacts, and why others are missing.

    `calibration` returns the inputs for int8. Raises the error of the last where none can be made.
    """
    made, missing = dict[str, Artifact](), dict[str, str]()
    last: FarmError | None = None
    for name in precisions:
        say(f"{opened.about.name}: compiling {name}")
        try:
            if name == INT8:
                data = quantise.quantise(opened.source, calibration()).onnx_bytes
                source = dataclasses.replace(opened.source, onnx_bytes=data)
                order = make.CompileOrder(dataclasses.replace(opened, source=source), kind)
            else:
                order = make.CompileOrder(opened, pipelines.store_weights(kind, name))
            order = dataclasses.replace(order, simulated=simulated, labels=labels)
            made[name] = make.make_artifact(order, folder / name, settings, store, say)
        except (UsageError, PermanentError) as error:
            missing[name], last = error.message, error
    if not made and last is not None:
        raise last
    return made, missing
