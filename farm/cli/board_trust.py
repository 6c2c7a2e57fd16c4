"""`farm board trust`: host keys of boards, confirmed by a person or a fingerprint, compared, forgotten."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.cli import board_remote, first_contact, options, output
from farm.connectivity import addresses as connectivity_addresses
from farm.connectivity import host_keys, ssh_handshake
from farm.connectivity import services as connectivity_services
from farm.errors import FarmError, UnavailableError, UsageError
from farm.processes import machine
from farm.settings import Settings
from farm.store import Store
from farm.values import Ssh

_AT_ONCE = 16


@output.command
def trust(
    names: options.Boards,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option("--fingerprint", metavar="SHA256:…", help="Fingerprint of the key to pin; repeatable."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the pinned keys, for instance after a reinstallation.")
    ] = False,
) -> None:
    """Confirm the host keys of boards. Shows each fingerprint and asks, or takes the one given."""
    if forget and fingerprint:
        raise UsageError("--forget and --fingerprint contradict each other", "First forget, then trust.")
    settings = farm_settings.load()
    known_hosts = host_keys.KnownHosts(settings.home_path / host_keys.FILE_NAME)
    with options.open_store(settings) as store:
        transports = {
            name: board_remote.require_ssh(name, board_remote.fetch_transport(store, name), "a host key")
            for name in board_remote.once(names)
        }
        if forget:
            for name, transport in transports.items():
                _forget(store, known_hosts, name, transport)
            return
    addresses = {name: connectivity_addresses.to_ssh_address(transport) for name, transport in transports.items()}
    before = {name for name, address in addresses.items() if _is_pinned(address, known_hosts)}
    failed = _compare_pinned({name: addresses[name] for name in before}, known_hosts, fingerprint or ())
    failed |= first_contact.confirm_host_keys(addresses, known_hosts, fingerprint or (), first_contact.find_asker())
    for name in addresses.keys() - failed.keys():
        output.stdout.print(f"{name}: {'its key is the pinned one' if name in before else 'trusted'}")
    _reconnect(settings, list(addresses.keys() - failed.keys()))
    board_remote.raise_first(failed)


def _is_pinned(address: ssh_handshake.SshAddress, known_hosts: host_keys.KnownHosts) -> bool:
    return bool(address.host_key or known_hosts.find(address.host, address.port))


def _compare_pinned(
    addresses: Mapping[str, ssh_handshake.SshAddress], known_hosts: host_keys.KnownHosts, wanted: Collection[str]
) -> dict[str, FarmError]:
    """Return by board why its pinned key is not valid any more."""
    given = {host_keys.require_fingerprint(text) for text in wanted}

    def look(address: ssh_handshake.SshAddress) -> FarmError | None:
        pins = [address.host_key] if address.host_key else []
        pins = pins or [key.fingerprint for key in known_hosts.find(address.host, address.port)]
        try:
            key = ssh_handshake.fetch_host_key(address, wanted=pins, known_hosts=known_hosts)
        except FarmError as error:
            return error
        return host_keys.changed(str(address), [key], sorted(given)) if given and key.fingerprint not in given else None

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "farm-host-keys") as pool:
        found = dict(zip(addresses, pool.map(look, addresses.values()), strict=True))
    return {name: error for name, error in found.items() if error is not None}


def _forget(store: Store, known_hosts: host_keys.KnownHosts, name: str, transport: Ssh) -> None:
    address = connectivity_addresses.to_ssh_address(transport)
    forgotten = known_hosts.remove(address.host, address.port)
    if transport.host_key:
        unpinned = dataclasses.replace(transport, host_key="")
        forgotten = store.boards.update(name, transport=unpinned, by=machine.name_user()) or forgotten
    output.stdout.print(f"{name}: {'its key is no longer trusted' if forgotten else 'no key was pinned'}")


def _reconnect(settings: Settings, names: list[str]) -> None:
    """Notify running services of a confirmed key, so that they connect now."""
    with contextlib.suppress(UnavailableError):
        if names and (services := connectivity_services.find_services(settings)):
            services.retry(names)
