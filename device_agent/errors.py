"""Errors of a board's clocks and sensors.

RPC functions turn them into a `PinReport` or an outcome; the command line into an exit code.
"""

from __future__ import annotations


class AgentError(Exception):
    """The root of the tree."""


class BadPointError(AgentError):
    """The board lacks this operating point; the message lists what it has."""


class ClockError(AgentError):
    """A clock file did not take a value; the message names the file and its content."""


class BusyError(AgentError):
    """Another client holds the clocks; the message names it."""


class HelperUnavailableError(AgentError):
    """No clock helper answers at its socket, or it refuses this user."""


class RefusedError(AgentError):
    """The helper does not write this path, or not this value."""


class UnsafeError(AgentError):
    """Clocks could not be restored; nothing is pinned until an operator clears the board."""


class SensorError(AgentError):
    """A power sensor failed, or returned an impossible value."""
