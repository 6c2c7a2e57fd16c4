"""From how a board is registered to where its sshd is and which key it is shown. Nothing here connects."""

from __future__ import annotations

from pathlib import Path

from farm import settings
from farm.fleet.ssh_handshake import SshAddress
from farm.values import Ssh

# The order in which OpenSSH's own client tries them (ssh_config(5), IdentityFile), those left out that no board has.
_USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


def to_ssh_address(transport: Ssh, default_key_file: str | None = None) -> SshAddress:
    """The address of a board reached over SSH, with its pinned host key where the registration names one.

    A board registered without a key gets `default_key_file`; None stands for the setting FARM_SSH_KEY, and that being
    empty for the first of OpenSSH's usual files that is there. Whether the file can be used is found out on connecting.
    """
    if default_key_file is None:
        default_key_file = settings.load().ssh_key
    named = transport.identity_file or default_key_file
    key_file = Path(named).expanduser() if named else _find_usual_key()
    return SshAddress(transport.host, transport.user, key_file, transport.port, transport.host_key)


def _find_usual_key() -> Path:
    """The first usual key that is there, else the first of all: the error on connecting then names it."""
    paths = [Path(text).expanduser() for text in _USUAL_KEYS]
    return next((path for path in paths if path.is_file()), paths[0])
