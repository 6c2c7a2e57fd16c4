"""Resolve a board's registration to its sshd's address, jump hosts and keys. Connects to nothing.

The user's OpenSSH configuration fills in what the registration leaves open, as for `ssh` itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from farm import settings
from farm.connectivity import ssh_config, user_keys
from farm.connectivity.ssh_config import HostConfig
from farm.connectivity.ssh_handshake import SshAddress
from farm.values import Ssh

# The order of OpenSSH's own client (ssh_config(5), IdentityFile), without types that no board has.
_USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


def to_ssh_address(transport: Ssh, default_key_file: str | None = None) -> SshAddress:
    """The address of a board reached over SSH, with its pinned host key if registered.

    A board registered without a key gets `default_key_file` (None: the setting FARM_SSH_KEY). If that is empty too, it
    gets the agent's keys, and the OpenSSH configuration's file or else the first usual one present. Whether a file is
    usable is found on connecting. Raises UsageError for an unusable configuration, DeadlineError if `ssh -G` does not
    answer.
    """
    known = settings.load()
    key_file = transport.identity_file or (known.ssh_key if default_key_file is None else default_key_file)
    address = _resolve(transport.host, transport.user, transport.port, key_file, Path(known.ssh_config).expanduser())
    return dataclasses.replace(address, host_key=transport.host_key)


def _resolve(alias: str, user: str, port: int, key_file: str, path: Path, depth: int = 0) -> SshAddress:
    ssh_config.require_depth(depth, alias)
    found = ssh_config.find_host(alias, path, user, None if port == SshAddress.port else port)
    jumps = tuple(_resolve_jump(text, path, depth + 1) for text in found.jumps)
    files, agent = _choose_keys(found, key_file)
    return SshAddress(
        alias,
        user or found.user or ssh_config.name_login(),
        files[0],
        # The configuration overrides the registration's default.
        port if port != SshAddress.port else found.port or port,
        more_keys=files[1:],
        agent=agent,
        only_these_keys=found.only_these_keys or bool(key_file),
        endpoint="" if found.host == alias else found.host,
        # A jump host's own jump hosts come first.
        jumps=tuple(each for jump in jumps for each in (*jump.jumps, dataclasses.replace(jump, jumps=()))),
    )


def _resolve_jump(text: str, path: Path, depth: int) -> SshAddress:
    user, host, port = ssh_config.split_jump(text)
    return _resolve(host, user, port or SshAddress.port, settings.load().ssh_key, path, depth)


def _choose_keys(found: HostConfig, key_file: str) -> tuple[tuple[Path, ...], str]:
    """The key files, at least one, and the agent to use. A named file is used alone.

    The agent is used for a key whose file alone cannot sign.
    """
    if key_file:
        path = Path(key_file).expanduser()
        return (path,), found.agent if user_keys.needs_agent(path) else ""
    paths = found.key_files or tuple(Path(text).expanduser() for text in _USUAL_KEYS)
    there = tuple(path for path in paths if path.is_file())
    return (there if found.key_files else there[:1]) or paths[:1], found.agent
