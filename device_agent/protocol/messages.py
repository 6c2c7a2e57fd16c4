"""The base of every message: frozen dataclasses to and from checked JSON, and the frame for large payloads."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

M = TypeVar("M", bound="Message")

# The longest text is a power trace: some 30 bytes a value.
MAX_TEXT_BYTES = 16 << 20
# The longest string is a dead worker's output; messages nest up to ten levels.
_MAX_STRING = 1 << 16
_MAX_DEPTH = 32
_SCALARS = frozenset({str, int, float, bool, type(None)})
# 64 bits, as every reader of a message expects.
_MAX_INT = 2**63


class ProtocolError(ValueError):
    """An invalid message: unknown key, missing key, wrong type, impossible value."""


class StrEnum(str, enum.Enum):
    """An enum whose members are their own text (Python 3.10 has no enum.StrEnum)."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


class Message:
    """JSON in and out for frozen dataclasses; unknown and missing keys are refused."""

    def to_dict(self) -> dict[str, Any]:
        return dict(_to_plain(self))

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[M], text: str) -> M:
        """Read a message. Raises ProtocolError."""
        try:
            value = load_json(text)
        except ProtocolError as error:
            raise ProtocolError(f"{cls.__name__} is not JSON: {error}") from error
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls: type[M], value: Any) -> M:
        """Read a message from plain JSON types. Raises ProtocolError."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{cls.__name__} must be a JSON object, not {type(value).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(value) - set(fields)):
            raise ProtocolError(f"{cls.__name__} has unknown keys: {', '.join(map(str, unknown))}")
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy: a generic class is hashable all the same
        arguments = {}
        for name, field in fields.items():
            if name in value:
                arguments[name] = _convert(hints[name], value[name], f"{cls.__name__}.{name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ProtocolError(f"{cls.__name__} lacks {name}")
        return cls(**arguments)


def _to_plain(value: Any) -> Any:
    """As dataclasses.asdict, in a third of the time: nothing here needs a deep copy."""
    if type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value):
        return {name: _to_plain(getattr(value, name)) for name in _names(type(value))}  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_to_plain(item) for item in value])
    return value


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The field types of a message, cached: resolving them takes longer than reading the message."""
    return get_type_hints(kind)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert JSON lists to tuples and strings to enums; check scalar types."""
    origin = getattr(hint, "__origin__", None)
    arguments: tuple[Any, ...] = getattr(hint, "__args__", ())
    if type(None) in arguments:  # Optional
        return None if value is None else _convert(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ProtocolError(f"{where} must be a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(arguments[0], item, where) for item in value)
        if len(arguments) != len(value):
            raise ProtocolError(f"{where} must have {len(arguments)} items")
        return tuple(_convert(a, item, where) for a, item in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} must be an object")
        return {str(key): _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from error
    if isinstance(hint, type) and issubclass(hint, Message):
        return hint.from_dict(value)
    wanted = (int, float) if hint is float else hint
    if hint is not Any and (not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool)):
        raise ProtocolError(f"{where} must be {hint.__name__}, not {type(value).__name__}")
    return float(value) if hint is float else value


def load_json(text: str | bytes) -> Any:
    """Parse JSON from another machine. Raises ProtocolError for what no message can hold.

    Beside invalid JSON: numbers that are not finite or beyond 64 bits, invalid or endless text, deep nesting.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise ProtocolError(f"{len(text)} characters are more than a message has")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ProtocolError("nested too deeply") from error
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    _check_plain(value, 0)
    return value


def _check_plain(value: Any, depth: int) -> None:
    if isinstance(value, str):
        if len(value) > _MAX_STRING:
            raise ProtocolError(f"a text of {len(value)} characters")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ProtocolError(f"text that is no Unicode: {error.reason}") from error
    elif isinstance(value, dict | list):
        if depth == _MAX_DEPTH:
            raise ProtocolError("nested too deeply")
        if isinstance(value, dict):
            for key in value:
                _check_plain(key, depth)
            value = value.values()
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ProtocolError(f"the number {value}")
    elif isinstance(value, int) and not -_MAX_INT <= value < 2 * _MAX_INT:
        raise ProtocolError("a number beyond 64 bits")


def require_positive(message: Message, *names: str) -> None:
    """Raise ProtocolError unless every field of `names` is above zero."""
    for name in names:
        if not getattr(message, name) > 0:
            raise ProtocolError(f"{type(message).__name__}.{name} must be > 0, not {getattr(message, name)}")


def pack_frame(message: str, payload: bytes) -> bytes:
    """Join a JSON text and its payload: little-endian u32 length, JSON, payload."""
    text = message.encode()
    return struct.pack("<I", len(text)) + text + payload


def unpack_frame(frame: bytes) -> tuple[str, bytes]:
    """The inverse of `pack_frame`. Raises ProtocolError on a short or garbled frame."""
    if len(frame) < 4:
        raise ProtocolError(f"frame of {len(frame)} bytes has no header")
    (size,) = struct.unpack_from("<I", frame)
    if len(frame) < 4 + size:
        raise ProtocolError(f"frame holds {len(frame) - 4} bytes where its header promises at least {size}")
    try:
        return frame[4 : 4 + size].decode(), frame[4 + size :]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"frame's message is not UTF-8: {error}") from error
