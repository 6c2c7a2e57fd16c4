"""Addresses and ports of boards, as text: checked, compared, written together. No name is looked up."""

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
# The characters that a shell or another program would read as its own.
_NO_USER = re.compile(r"^-|['`\";&<>|(){}]|\s-|\\$")
_LONGEST_USER = 255


def parse_address(text: str) -> str:
    """The address as it was written. Raises ValueError where it is neither a host name nor an IP address."""
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ValueError(f"{text!r} is no IP address; user and port have variables of their own") from None
    elif not _HOST_NAME.fullmatch(text) or len(text) > _LONGEST_NAME:
        raise ValueError(f"{text!r} is no host name; user and port have variables of their own")
    return text


def parse_user(text: str) -> str:
    """The user as it was written. Raises ValueError for what OpenSSH's client takes for no user (`valid_ruser`)."""
    if not 0 < len(text) <= _LONGEST_USER or not text.isprintable() or _NO_USER.search(text):
        raise ValueError(f"{text!r} is no user name")
    return text


def parse_port(text: str) -> int:
    """The port's number. Raises ValueError where it is none."""
    # Five digits at most: int() refuses thousands of them with words of its own.
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) <= _LAST_PORT:
        raise ValueError(f"{text!r} is no port; they go from 1 to {_LAST_PORT}")
    return int(text)


def canonical(address: str) -> str:
    """The same text for addresses that are the same; names are not looked up."""
    name = address.lower().rstrip(".")
    try:
        return str(ipaddress.ip_address(LOOPBACK if name == "localhost" else name))
    except ValueError:
        return name


def join(address: str, port: int) -> str:
    """Address and port in one, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def find_end(transport: Transport) -> tuple[str, int] | None:
    """The address and port at which a board is; None where the farm, or the tracker, will say."""
    match transport:
        case Ssh(host, _, port):
            return canonical(host), port
        case Direct(int(port)):
            return LOOPBACK, port
    return None


def require_new_end(name: str, transport: Transport, registered: Iterable[tuple[str, Transport]]) -> None:
    """Raise UsageError where another of the registered boards (name and transport) is at the same address and port."""
    end = find_end(transport)
    for other, known in registered:
        if end is not None and other != name and find_end(known) == end:
            raise UsageError(
                f"{name} would be at {join(*end)}, and so is {other}: a board is registered once",
                f"`farm board show {other}` shows it; give another address or port.",
            )
