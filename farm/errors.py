"""Every error that the farm raises on purpose. The branch is the retry policy; the code that raises picks it.

    FarmError
    ├── UsageError          the caller's input is wrong             exit 2, never retried
    │   └── ModelRefusedError   TVM has no code for a model on a target
    ├── TransientError      trying again may work                   exit 3 once retries are spent
    │   ├── DeadlineError       a wait ended; says what it waited for
    │   │   └── BoardBusyError      another client held the board throughout
    │   ├── BoardLostError      the connection to a board ended
    │   ├── InvalidReplyError   a board sent an invalid reply
    │   └── StoreFaultError     the store did not work this time
    ├── PermanentError      trying again cannot work                exit 1
    │   ├── UnavailableError    a part of the farm is missing       exit 3
    │   │   └── MachineBusyError    another farm measures on this machine
    │   ├── CodeRefusedError    a compiler or assembler refuses     exit 1
    │   └── LeaseOverError      this client has lost the board      exit 1
    ├── BoardUnsafeError    a board must not be used                exit 4
    │   └── BoardHostileError   a board attacked its client
    └── InternalError       a bug of the farm                       exit 1

Foreign errors are translated once, where they enter. All classes survive pickling (Ray moves them).
"""

from __future__ import annotations


class FarmError(Exception):
    """Base of the tree. `hint` is advice to the user; empty if there is nothing to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(FarmError):
    """The input is wrong: a flag, a file, a name."""

    exit_code = 2


class ModelRefusedError(UsageError):
    """TVM cannot compile a model for this target, but perhaps for another."""


class TransientError(FarmError):
    """Failed this time; the same call may work later."""

    exit_code = 3


class DeadlineError(TransientError):
    """A wait reached its deadline. The message names what was waited for, and for how long."""


class BoardBusyError(DeadlineError):
    """Another client held the board for the whole wait. The board is fine."""


class BoardLostError(TransientError):
    """The connection to a board ended before the answer. The board may or may not have done the work."""


class InvalidReplyError(TransientError):
    """A board's reply is invalid or impossible, and is discarded. The board is suspect; another one may work."""


class StoreFaultError(TransientError):
    """The store was locked, restarting or unreachable, or its connection ended. It may work again soon."""


class PermanentError(FarmError):
    """Failed, and the same call will fail again."""


class UnavailableError(PermanentError):
    """A required part of the farm is missing: tracker, agent, disk, optional package."""

    exit_code = 3


class MachineBusyError(UnavailableError):
    """Another farm command measured on this machine for the whole wait."""


class CodeRefusedError(PermanentError):
    """Code for a GPU is refused, or exceeds the GPU's resources: its source is at fault."""


class LeaseOverError(PermanentError):
    """A lease was not renewed in time, was ended by force, or was followed by a later one: release the board.

    `greatest` is the store's greatest token known to the board, if the board refused.
    """

    greatest = 0


class BoardUnsafeError(FarmError):
    """A board's clocks could not be restored: it must not be used until an operator has checked it."""

    exit_code = 4


class BoardHostileError(BoardUnsafeError):
    """A board sent an attack: it is quarantined until an operator has checked it."""


class InternalError(FarmError):
    """A bug of the farm."""
