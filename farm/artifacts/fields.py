"""What a manifest's fields may hold, whoever wrote it: they become file names, headers of wheels, and arguments.

A manifest's digest shows a change by accident or by hand. It is no signature: anybody can write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field

from farm.foreign import show_controls

# Of free text alone, which is shown to people: what a compiler said has lines.
_TEXTS_OF_LINES = frozenset({"reason", "not_made"})
# A year: nothing that a model or its parts take lasts longer. The end of the year 2286.
_LONGEST_S, _LATEST_S = 3.2e7, 1e10
_ELEMENTS = frozenset("biuf")
_MOST_BYTES = 1 << 50

Seconds = Annotated[float, Field(ge=0, lt=_LONGEST_S)]
Moment = Annotated[float, Field(ge=0, lt=_LATEST_S)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Bytes = Annotated[int, Field(ge=0, le=_MOST_BYTES)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _require_dtype(text: str) -> str:
    try:
        kind = np.dtype(text)
    except TypeError as error:
        raise ValueError("no element type of NumPy's") from error
    if kind.name != text or not (kind.kind in _ELEMENTS or hasattr(ml_dtypes, text)):
        raise ValueError("no type of numbers")
    return text


def _require_version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        raise ValueError("no version as PEP 440 has them") from error
    if not text.isascii() or text != text.strip():  # which `Version` would let pass
        raise ValueError("no version as PEP 440 has them")
    return text


DType = Annotated[str, AfterValidator(_require_dtype)]
PackageVersion = Annotated[str, AfterValidator(_require_version)]


def find_control(value: Any, where: str = "") -> str:
    """The place of the first text with a control character, or the end of a line where none belongs; "" for none."""
    if isinstance(value, str):
        has_lines = not _TEXTS_OF_LINES.isdisjoint(where.split("."))
        is_plain = show_controls(value) == value and (has_lines or not set(value) & set("\n\t"))
        return "" if is_plain else where
    if isinstance(value, Mapping):
        for key, each in value.items():
            here = f"{where}.{show_controls(key)}".lstrip(".")
            if found := find_control(str(key), here) or find_control(each, here):
                return found
    elif isinstance(value, list | tuple):
        for each in value:
            if found := find_control(each, where):
                return found
    return ""
