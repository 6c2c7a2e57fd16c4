"""The error tree: what Ray and the CLI rely on."""

from __future__ import annotations

import inspect
import pickle

import pytest

from farm import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.FarmError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_survives_pickling(cls: type[errors.FarmError]) -> None:
    """An error that crossed a process keeps its class, message, hint and exit code."""
    error = cls("the disk is full", "free some space")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.hint, copy.exit_code) == ("the disk is full", "free some space", cls.exit_code)
    assert str(copy) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_branch_is_one_of_the_policies(cls: type[errors.FarmError]) -> None:
    """Every class hangs on exactly one branch, since the branch is the retry policy."""
    branches = (
        errors.UsageError,
        errors.TransientError,
        errors.PermanentError,
        errors.BoardUnsafeError,
        errors.InternalError,
    )
    if cls is not errors.FarmError:
        assert sum(issubclass(cls, branch) for branch in branches) == 1


def test_message_without_hint_is_one_line() -> None:
    """Without a hint the text is the message alone; with one the hint follows on a line of its own."""
    assert str(errors.UsageError("no such file")) == "no such file"
    assert str(errors.UsageError("no such file", "check the path")) == "no such file\n  check the path"


def test_exit_codes_follow_the_contract() -> None:
    """2 is bad input, 3 an unavailable farm, 4 an unsafe board, 1 any other failure."""
    assert {c.__name__: c.exit_code for c in CLASSES} == {
        "FarmError": 1,
        "UsageError": 2,
        "ModelRefusedError": 2,
        "TransientError": 3,
        "DeadlineError": 3,
        "BoardBusyError": 3,
        "BoardLostError": 3,
        "InvalidReplyError": 3,
        "StoreFaultError": 3,
        "PermanentError": 1,
        "CodeRefusedError": 1,
        "UnavailableError": 3,
        "MachineBusyError": 3,
        "LeaseOverError": 1,
        "BoardUnsafeError": 4,
        "BoardHostileError": 4,
        "InternalError": 1,
    }
