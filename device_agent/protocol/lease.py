"""Messages about leases: what a session says that it holds, and what the agent makes of it.

Tokens of one store can be compared with each other and with nothing else. Leases are kept by the farm's store; the
agent only remembers the greatest token that it has seen of each.
"""

from __future__ import annotations

import dataclasses
import re

from device_agent.protocol.messages import Message, ProtocolError, StrEnum

# From tvm/rpc/base.py: what both sides of TVM's RPC begin with, and the answer of a server that takes the client.
RPC_MAGIC = 0xFF271
RPC_SUCCESS = RPC_MAGIC
RPC_MISMATCH = RPC_MAGIC + 2

# A greeting that begins so asks for no session; see `fence_key`.
FENCE_PREFIX = "fence:"

_NONCE = re.compile(r"[A-Za-z0-9]{0,64}")
_STORE = re.compile(r"[A-Za-z0-9._-]{1,64}")
# What SQLite, and JSON in other languages, still tell apart.
_GREATEST_TOKEN = 2**53
_MAX_TEXT = 200


@dataclasses.dataclass(frozen=True)
class LeaseClaim(Message):
    """The lease that a client holds: its number in its store; `owner` and `purpose` are for people.

    `nonce` is drawn for each lease: a store that was put back to an earlier state gives its numbers a second time.
    """

    store: str
    token: int
    owner: str = ""
    purpose: str = ""
    nonce: str = ""

    def __post_init__(self) -> None:
        if not _STORE.fullmatch(self.store):
            raise ProtocolError(f"LeaseClaim.store {self.store!r} is no store's identity")
        if not 0 < self.token <= _GREATEST_TOKEN:
            raise ProtocolError(f"LeaseClaim.token must be 1 to {_GREATEST_TOKEN}, not {self.token}")
        if max(len(self.owner), len(self.purpose)) > _MAX_TEXT:
            raise ProtocolError(f"LeaseClaim.owner and .purpose have {_MAX_TEXT} characters at most")
        if not _NONCE.fullmatch(self.nonce):
            raise ProtocolError(f"LeaseClaim.nonce {self.nonce!r} is none")

    def is_same(self, other: LeaseClaim) -> bool:
        """Whether both are one lease; a nonce that one of them does not say is not compared."""
        known = bool(self.nonce and other.nonce)
        return (self.store, self.token) == (other.store, other.token) and (not known or self.nonce == other.nonce)


class ClaimStatus(StrEnum):
    """What the agent made of a claim or a fence."""

    OK = "ok"
    EVICTED = "evicted"  # ok, and the session of an older lease of the same store was ended
    REFUSED = "refused"  # a later lease of the same store has been here, or another one with the same number


@dataclasses.dataclass(frozen=True)
class ClaimReport(Message):
    """The agent's answer. `greatest` and `owner` are of the greatest token known of the store, the claim's included.

    `holder` says in words who has a session with the board now, as far as the agent knows; empty: nobody.
    """

    status: ClaimStatus
    message: str = ""
    greatest: int = 0
    owner: str = ""
    holder: str = ""


def fence_key(claim: LeaseClaim) -> str:
    """What stands in the place of a client's key in TVM's handshake to say only: this lease is the latest.

    The agent answers at once, also while it serves somebody else, with `RPC_SUCCESS` and a `ClaimReport`.
    """
    owner = re.sub(r"[^!-9;-~]", "_", claim.owner)[:_MAX_TEXT]
    return f"{FENCE_PREFIX}{claim.store}:{claim.token}:{owner}" + (f":{claim.nonce}" if claim.nonce else "")


def parse_fence_key(key: str) -> LeaseClaim:
    """The inverse of `fence_key`, but for what it made of the owner. Raises ProtocolError."""
    prefix, colon, rest = key.partition(":")
    store, _, rest = rest.partition(":")
    token, _, rest = rest.partition(":")
    owner, _, nonce = rest.partition(":")
    if prefix + colon != FENCE_PREFIX or not re.fullmatch(r"[0-9]{1,16}", token):
        raise ProtocolError(f"{key!r} is no fence")
    return LeaseClaim(store, int(token), owner, nonce=nonce)
