"""Every error that the farm raises on purpose. The branch is the retry policy; the code that raises picks it.

    FarmError
    ├── UsageError          the caller's input is wrong             exit 2, never retried
    │   └── ModelRefusedError   TVM has no code for a model on a target
    ├── TransientError      trying again may work                   exit 3 once retries are spent
    │   ├── DeadlineError       a wait ended; says what it waited for
    │   │   └── BoardBusyError      another holder had the board all the while
    │   ├── BoardLostError      the connection to a board ended
    │   ├── InvalidReplyError  an invalid reply of a board
    │   └── StoreFaultError     the store did not work this time
    ├── PermanentError      trying again cannot work                exit 1
    │   ├── UnavailableError    a part of the farm is missing       exit 3
    │   │   └── MachineBusyError    another farm measures on this machine
    │   ├── CodeRefusedError    a compiler or assembler refuses     exit 1
    │   └── LeaseOverError      a board is no longer ours to use    exit 1
    ├── BoardUnsafeError    a board must not be used                exit 4
    │   └── BoardHostileError   a board attacked its client
    └── InternalError       our bug                                 exit 1

Foreign errors are translated once, where they enter. All classes survive pickling (Ray moves them).
"""

from __future__ import annotations


class FarmError(Exception):
    """Base of the tree. `hint` says what the user can do about it; empty where there is nothing to do."""

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
    """TVM cannot compile a model for a target. For another target it may."""


class TransientError(FarmError):
    """Failed this time; the same call may work later."""

    exit_code = 3


class DeadlineError(TransientError):
    """A wait reached its deadline. The message says what was waited for, and for how long."""


class BoardBusyError(DeadlineError):
    """Another client held the board for as long as we waited. Nothing is wrong with the board."""


class BoardLostError(TransientError):
    """The connection to a board ended before the answer came. The board may or may not have done the work."""


class InvalidReplyError(TransientError):
    """A board's answer cannot be true, or is none. It is not believed; the board is suspect, another one may do."""


class StoreFaultError(TransientError):
    """The store was locked, restarting or out of reach, or the connection to it ended. It may work again soon."""


class PermanentError(FarmError):
    """Failed, and the same call will fail again."""


class UnavailableError(PermanentError):
    """A part of the farm that this needs is not there: tracker, agent, disk, optional package."""

    exit_code = 3


class MachineBusyError(UnavailableError):
    """Another farm command measures on this machine, and did so for as long as we waited."""


class CodeRefusedError(PermanentError):
    """Code for a GPU is refused, or takes more than the GPU has: a fault of its source."""


class LeaseOverError(PermanentError):
    """A lease was not renewed in time, ended by force, or followed by a later one: let go of the board.

    `greatest` is the greatest token of the store that the board knows, where it was the board that refused.
    """

    greatest = 0


class BoardUnsafeError(FarmError):
    """A board's clocks could not be restored: it must not be used until a person has checked it."""

    exit_code = 4


class BoardHostileError(BoardUnsafeError):
    """A board sent what would have harmed us: it is quarantined until a person has checked it."""


class InternalError(FarmError):
    """A bug of ours."""
