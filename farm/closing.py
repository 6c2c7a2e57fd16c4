"""What holds something until it is closed, and may be used in a `with`."""

from __future__ import annotations

import abc
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(abc.ABC):
    """Closed at the end of its `with`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what is held."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
