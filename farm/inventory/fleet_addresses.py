"""Addresses and ports of boards, as text: check, compare and join them. Resolves no name."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from farm.errors import UsageError
from farm.values import Direct, Ssh, Transport

LOOPBACK = "127.0.0.1"
_LAST_PORT = 65535
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
_LONGEST_NAME = 253
# Characters that a shell or another program would interpret.
_NO_USER = re.compile(r"^-|['`\";&<>|(){}]|\s-|\\$")
_LONGEST_USER = 255


def parse_address(text: str) -> str:
    """Return the address unchanged. Raises ValueError unless it is a host name or an IP address."""
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ValueError(f"{text!r} is no IP address; user and port have variables of their own") from None
    elif not _HOST_NAME.fullmatch(text) or len(text) > _LONGEST_NAME:
        raise ValueError(f"{text!r} is no host name; user and port have variables of their own")
    return text


def parse_user(text: str) -> str:
    """Return the user unchanged. Raises ValueError for a name that OpenSSH's client refuses (`valid_ruser`)."""
    if not 0 < len(text) <= _LONGEST_USER or not text.isprintable() or _NO_USER.search(text):
        raise ValueError(f"{text!r} is no user name")
    return text


def parse_port(text: str) -> int:
    """Parse a port. Raises ValueError."""
    # Five digits at most: int() has its own error for thousands of digits.
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) <= _LAST_PORT:
        raise ValueError(f"{text!r} is no port; they go from 1 to {_LAST_PORT}")
    return int(text)


def canonical(address: str) -> str:
    """A canonical text for equal addresses; resolves no name."""
    name = address.lower().rstrip(".")
    try:
        return str(ipaddress.ip_address(LOOPBACK if name == "localhost" else name))
    except ValueError:
        return name


def join(address: str, port: int) -> str:
    """Join address and port, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def find_end(transport: Transport) -> tuple[str, int] | None:
    """A board's address and port; None if the farm or the tracker determines them."""
    match transport:
        case Ssh(host, _, port):
            return canonical(host), port
        case Direct(int(port)):
            return LOOPBACK, port
    return None


def require_new_end(name: str, transport: Transport, registered: Iterable[tuple[str, Transport]]) -> None:
    """Raise UsageError if another registered board (name and transport) has the same address and port."""
    end = find_end(transport)
    for other, known in registered:
        if end is not None and other != name and find_end(known) == end:
            raise UsageError(
                f"{name} would be at {join(*end)}, and so is {other}: a board is registered once",
                f"`farm board show {other}` shows it; give another address or port.",
            )
