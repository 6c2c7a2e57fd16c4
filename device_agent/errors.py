"""What can go wrong with a board's clocks and sensors, as the agent's own code raises it.

The RPC functions turn these into a `PinReport` or an outcome; the command line into an exit code.
"""

from __future__ import annotations


class AgentError(Exception):
    """The root of the tree."""


class BadPointError(AgentError):
    """An operating point that this board does not have; the message names what it has."""


class ClockError(AgentError):
    """A clock file did not take what was written; the message says which, and what it holds."""


class BusyError(AgentError):
    """Somebody else holds the clocks; the message says who."""


class HelperUnavailableError(AgentError):
    """No clock helper answers at its socket, or it refuses this user."""


class RefusedError(AgentError):
    """The helper does not write this path, or not this value."""


class UnsafeError(AgentError):
    """Clocks could not be restored; nothing is pinned until an operator clears the board."""


class SensorError(AgentError):
    """A power sensor gave an error, or a value that cannot be."""
