"""Whole models in scripts, brought to the form that `farm tune` tunes, so that its results apply."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.metaschedule.tvm_objects import load_for_script
from farm.models import inputs as model_inputs
from farm.models.source import resolve_model
from farm.search.graph import importer, pipelines

_log = logging.getLogger(__name__)

load_for_script()
import tvm  # noqa: E402
import tvm.s_tir.meta_schedule as ms  # noqa: E402


def import_model(model: str | Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    """Import an ONNX file or a model of the zoo, as `farm tune` does.

    `shapes` (input name -> shape) are needed for inputs with open dimensions. Raises UsageError.
    """
    loaded = resolve_model(str(model)).load()
    settled = model_inputs.resolve_inputs(model_inputs.read_inputs(loaded), shapes or {}, loaded)
    return importer.import_onnx(loaded, {spec.name: spec.static_shape for spec in settled})


def farm_pipeline(name: str) -> Any:
    """Return the farm's graph pipeline as a Relax pass, instead of `relax.get_pipeline("zero")`; run it `with target:`.

    Inside `with database:` it also applies the database's schedules and packs weights; a FarmDatabase then needs the
    same `pipeline`. Raises UsageError for an unknown name; so does the pass, for a model that TVM cannot compile.
    """
    wanted = pipelines.require_pipeline(name)

    def run(module: Any, _: Any) -> Any:
        target = tvm.target.Target.current()
        if target is None:
            raise UsageError("the farm's pipeline needs a target", "Run it inside `with target:`.")
        prepared, used = pipelines.prepare(module, target, wanted)
        if used.name != wanted.name:
            _log.warning("this model uses %s; give FarmDatabase the same pipeline", used.name)
        database = ms.Database.current()
        return prepared if database is None else pipelines.finish(prepared, target, database, used)

    return tvm.transform.module_pass(run, opt_level=0, name="FarmPipeline")
