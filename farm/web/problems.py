"""What went wrong, for whoever asked: on the API a problem document (RFC 9457), on pages a page that says the same."""

from __future__ import annotations

import dataclasses
from http import HTTPStatus
from typing import Any

from farm import foreign
from farm.errors import FarmError, TransientError, UnavailableError, UsageError

MEDIA_TYPE = "application/problem+json"
# What is repeated to whoever sent it ends here.
_LONGEST = 600


class Refused(Exception):
    """A request that is not carried out; `hint` says what can be done."""

    def __init__(self, status: int, detail: str, hint: str = "") -> None:
        super().__init__(status, detail, hint)
        self.problem = ProblemDetails(status, detail, hint)


@dataclasses.dataclass(frozen=True)
class ProblemDetails:
    """One answer to a request that failed."""

    status: int
    detail: str
    hint: str = ""

    @property
    def title(self) -> str:
        """The status in words."""
        return HTTPStatus(self.status).phrase

    def to_document(self) -> dict[str, Any]:
        """As RFC 9457 has it; `hint` is an extension."""
        about = {"type": "about:blank", "title": self.title, "status": self.status}
        return about | {"detail": shorten(self.detail), "hint": shorten(self.hint)}


def shorten(text: str) -> str:
    """A text fit to be sent back: its controls are shown, and it ends somewhere."""
    text = foreign.show_controls(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def from_error(error: FarmError) -> ProblemDetails:
    """The problem that an error of the farm's stands for."""
    if isinstance(error, UsageError):
        status = 404 if error.message.startswith(("there is no ", "no workload is called")) else 422
    elif isinstance(error, TransientError | UnavailableError):
        status = 503
    else:
        status = 500
    return ProblemDetails(status, error.message, error.hint)
