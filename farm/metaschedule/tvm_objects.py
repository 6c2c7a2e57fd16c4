"""What scripts share with TVM: its wrapper for callback objects, plain targets, models as `farm tune` has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tvm.ir.utils import derived_object

from farm.errors import UsageError
from farm.models import inputs as model_inputs
from farm.models.source import resolve_model
from farm.search import tvm_env
from farm.search.graph import importer, pipelines

T = TypeVar("T")

_LOGGERS = ("tvm.s_tir.meta_schedule", "tvm.s_tir.meta_schedule.tune_context")
_log = logging.getLogger(__name__)


def load_for_script() -> None:
    """Load TVM quickly and keep the script's log level of MetaSchedule, which the farm's own searches lower.

    Call it before importing TVM's tuning parts; it saves nothing once the script has made a TuneContext.
    """
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    tvm_env.load()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def as_tvm_object(cls: type[T]) -> type[T]:
    """Apply TVM's `derived_object`, keeping name and docstring; a class with `close` becomes a context manager."""
    load_for_script()

    wrapped: Any = derived_object(cls)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(wrapped, attribute, getattr(cls, attribute))
    # TVM's databases use `with` to become the current one.
    if hasattr(cls, "close") and not hasattr(wrapped, "__enter__"):
        wrapped.__enter__ = lambda self: self
        wrapped.__exit__ = lambda self, *_: self.close()
    return wrapped  # type: ignore[no-any-return]


def to_plain_target(target: Any) -> dict[str, Any]:
    """Return a target in TVM's dict form as plain JSON values, without derived ones."""
    return {
        str(key): _plain(value)
        for key, value in dict(target.export()).items()
        if key not in ("tag", "keys") and value not in ("", None)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "items"):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value]


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
