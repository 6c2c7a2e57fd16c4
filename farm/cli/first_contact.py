"""First contact: a person confirms the host keys of new boards. Nothing logs in here.

A key that is pinned is compared on every connection (`farm/connectivity/host_keys.py`); one that has changed is never
asked about.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping

from farm.cli import output
from farm.connectivity import host_keys, ssh_handshake
from farm.errors import FarmError, UsageError

_AT_ONCE = 16

# Takes a question and returns a person's answer; None without a terminal.
Ask = Callable[[str], str]


def confirm_host_keys(
    addresses: Mapping[str, ssh_handshake.SshAddress],
    known_hosts: host_keys.KnownHosts,
    accept: Collection[str] = (),
    ask: Ask | None = None,
) -> dict[str, FarmError]:
    """Pin the host key of every board that has none yet; returns why that failed, by board, for those where it did.

    A key whose fingerprint is in `accept` is pinned without a question. For any other `ask` is asked, one board after
    another, though keys are fetched at once; without it (see `find_asker`) the board is refused with what to do.
    Boards at one address are one question. Raises UsageError for what is no fingerprint.
    """
    accepted = {host_keys.require_fingerprint(text) for text in accept}
    unpinned: dict[tuple[str, int], list[str]] = {}
    for board, address in addresses.items():
        if not address.host_key and not known_hosts.find(address.host, address.port):
            unpinned.setdefault((address.host, address.port), []).append(board)
    refused = _confirm_ways(addresses, known_hosts, accept, ask)
    unpinned = {end: left for end, boards in unpinned.items() if (left := [b for b in boards if b not in refused])}
    if not unpinned:
        return refused
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "farm-host-keys") as pool:
        shown = {
            end: pool.submit(_fetch, addresses[boards[0]], known_hosts, accepted) for end, boards in unpinned.items()
        }
    for end, boards in unpinned.items():
        try:
            key = shown[end].result()
            if key.fingerprint not in accepted:
                _require_confirmed(boards, addresses[boards[0]], key, accepted, ask)
            known_hosts.add(*end, key)
        except FarmError as error:
            refused |= dict.fromkeys(boards, error)
    return refused


def find_asker() -> Ask | None:
    """Return a prompt at the terminal, or None where input or messages go elsewhere."""
    return _ask_terminal if sys.stdin.isatty() and sys.stderr.isatty() else None


def _confirm_ways(
    addresses: Mapping[str, ssh_handshake.SshAddress],
    known_hosts: host_keys.KnownHosts,
    accept: Collection[str],
    ask: Ask | None,
) -> dict[str, FarmError]:
    """Confirm the hosts on the route to boards, the nearest first: an unknown host hides those behind it."""
    ways = {
        f"{jump}, on the way to {board},": (board, dataclasses.replace(jump, jumps=address.jumps[:number]))
        for board, address in addresses.items()
        for number, jump in enumerate(address.jumps)
    }
    if not ways:
        return {}
    refused = confirm_host_keys({name: jump for name, (_, jump) in ways.items()}, known_hosts, accept, ask)
    return {ways[name][0]: error for name, error in refused.items()}


def _fetch(
    address: ssh_handshake.SshAddress, known_hosts: host_keys.KnownHosts, accepted: Collection[str]
) -> host_keys.HostKey:
    """Return the key to confirm: an accepted one if the board has it, else the first that it shows."""
    if accepted:
        try:
            return ssh_handshake.fetch_host_key(address, wanted=accepted, known_hosts=known_hosts)
        except host_keys.HostKeyError:
            pass
    return ssh_handshake.fetch_host_key(address, known_hosts=known_hosts)


def _require_confirmed(
    boards: list[str],
    address: ssh_handshake.SshAddress,
    key: host_keys.HostKey,
    accepted: Collection[str],
    ask: Ask | None,
) -> None:
    name = " and ".join(boards)
    what = f"{name} at {address} shows the host key {key.fingerprint} ({key.kind})"
    if accepted:
        raise host_keys.HostKeyError(
            f"{what}, which is none of those that you accept: {', '.join(sorted(accepted))}",
            "Compare with what ssh-keygen -lf prints on the board itself. If it differs, something else answers there.",
        )
    if ask is None:
        raise host_keys.UnknownHostKeyError(
            f"{what}, which is not confirmed yet",
            "Compare with what ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on the board itself, then: "
            f"farm board trust {' '.join(boards)} --fingerprint {key.fingerprint}, or host_key in a fleet file.",
            key,
        )
    answer = ask(
        f"{what}.\nNobody has confirmed it yet. Does the board itself print the same? "
        "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub)\nTrust it? yes, no, or the fingerprint: "
    ).strip()
    if not answer.startswith("SHA256:") and answer.lower() not in ("yes", "no", "n", ""):
        # No consent: as in OpenSSH, the answer must be typed in full.
        answer = ask("Please type yes, no or the fingerprint: ").strip()
    if answer.startswith("SHA256:"):
        if host_keys.require_fingerprint(answer) != key.fingerprint:
            raise host_keys.HostKeyError(
                f"{what}, not the {answer} that you gave", "Something else answers at the board's address."
            )
        return
    if answer.lower() != "yes":
        raise UsageError(f"the host key of {name} was not confirmed", "Nothing was sent to it.")


def _ask_terminal(question: str) -> str:
    # Without a deadline: a person answers, and Ctrl-C is at hand.
    output.stderr.print(question, end="", soft_wrap=True, markup=False)
    return sys.stdin.readline()
