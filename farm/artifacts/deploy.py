"""Deploy an artifact as a Python package that the board's own TVM runtime runs, without an installer.

Each version has a folder below the login's home; a link with the package's name points to the current one.
"""

from __future__ import annotations

import dataclasses
import posixpath
import shlex
import tempfile
from pathlib import Path

from device_agent.protocol.interpreters import folder_command
from farm.artifacts import places
from farm.artifacts.checking import require_verified
from farm.artifacts.manifest import Artifact
from farm.artifacts.package import find_name, list_members
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_files import put
from farm.errors import PermanentError
from farm.provision.layout import HOME_PREFIX, MODELS_FOLDER, ROOT_PREFIX

# For a short command on the board.
_COMMAND_TIMEOUT_S = 15.0


@dataclasses.dataclass(frozen=True)
class Deployed:
    """The deployed package: add `folder` to Python's path, or run `command`.

    The command names the package's folder, since `python -m` searches the current folder first. Of `bytes`,
    `sent_bytes` crossed the network; None for a board on this machine.
    """

    package: str
    folder: str
    command: str
    bytes: int
    sent_bytes: int | None


def deploy_here(artifact: Artifact, folder: Path) -> Deployed:
    """Deploy to a board on this machine. Raises PermanentError for an unverified artifact."""
    require_verified(artifact)
    package, members = find_name(artifact.manifest.name), list_members(artifact)
    with places.new_folder(folder / package) as partial:
        for name, data in members.items():
            (partial / name).write_bytes(data)
    command = shlex.join(folder_command(str(folder / package)))
    return Deployed(package, str(folder), command, sum(map(len, members.values())), None)


def deploy_over_ssh(artifact: Artifact, connection: SshConnection, home: str = ".") -> Deployed:
    """Deploy to a remote board; send only missing files, and switch to the new package once it is complete.

    Raises PermanentError, TransientError, DeadlineError, BoardLostError.
    """
    require_verified(artifact)
    package, members = find_name(artifact.manifest.name), list_members(artifact)
    folder = posixpath.join(home, MODELS_FOLDER)
    versions = posixpath.join(folder, ".versions")
    version = posixpath.join(versions, f"{package}-{artifact.manifest.code_sha256[:12]}")
    _require(connection, f"mkdir -p {shlex.quote(version)}")
    sent = 0
    with tempfile.TemporaryDirectory(prefix="farm-deploy-") as local:
        for name, data in members.items():
            path = Path(local) / name
            path.write_bytes(data)
            moved = put(connection, path, posixpath.join(version, name))
            sent += moved.size if moved.moved else 0
    link = posixpath.join(folder, package)
    target = posixpath.relpath(version, folder)
    # `ln -sfn` unlinks first, which would leave a moment without a link.
    _require(
        connection,
        f"ln -sfn {shlex.quote(target)} {shlex.quote(link)}.new && mv -T {shlex.quote(link)}.new {shlex.quote(link)}",
    )
    where = _require(connection, f"cd {shlex.quote(folder)} && pwd").strip()
    command = f"{_find_python(connection)} {shlex.quote(posixpath.join(where, package))}"
    return Deployed(package, where, command, sum(map(len, members.values())), sent)


def _find_python(connection: SshConnection) -> str:
    """Return the provisioned interpreter with TVM's runtime, else python3."""
    places = [f"{ROOT_PREFIX}/current/bin/python", f'"$HOME"/{HOME_PREFIX}/current/bin/python']
    found = _require(
        connection, f'for p in {" ".join(places)}; do if [ -x "$p" ]; then echo "$p"; exit; fi; done; echo python3'
    )
    return shlex.quote(found.strip())


def _require(connection: SshConnection, command: str) -> str:
    done = connection.exec(command, _COMMAND_TIMEOUT_S)
    if done.code:
        said = done.err.decode(errors="replace").strip().splitlines()
        raise PermanentError(f"{connection.address} refuses: {said[-1] if said else f'exit code {done.code}'}")
    return done.out.decode(errors="replace")
