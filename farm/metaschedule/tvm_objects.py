"""TVM's wrapper for callback objects as a context manager, and targets as plain dicts."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from tvm.ir.utils import derived_object

from farm.search import tvm_env

T = TypeVar("T")

_LOGGERS = ("tvm.s_tir.meta_schedule", "tvm.s_tir.meta_schedule.tune_context")


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
