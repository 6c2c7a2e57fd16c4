"""Keys that a file alone cannot sign with: public halves, and keys on a hardware token."""

from __future__ import annotations

import base64
import os
import pathlib
import struct
import subprocess
from collections.abc import Iterator

import pytest

from farm.connectivity.host_keys import load_user_keys
from farm.connectivity.ssh_config import to_ssh_address
from farm.errors import UsageError
from farm.inventory.fleet_addresses import parse_user
from farm.inventory.fleet_document import Variables
from farm.values import Ssh


def _pack(*parts: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def write_token_key(path: pathlib.Path, kind: str) -> pathlib.Path:
    """A private key as `ssh-keygen -t ed25519-sk` writes it: a handle to what the token holds."""
    public = _pack(kind.encode(), b"\1" * 32, b"ssh:")
    private = b"\0" * 8 + public + b"\1" + _pack(b"handle", b"", b"comment")
    data = b"openssh-key-v1\0" + _pack(b"none", b"none", b"") + struct.pack(">I", 1) + _pack(public, private)
    text = base64.encodebytes(data).decode()
    path.write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{text}-----END OPENSSH PRIVATE KEY-----\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def agent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A running agent with the key `lab`, whose halves are in the test's folder with the modes of ssh-keygen."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "lab")], check=True)
    socket = str(tmp_path / "agent")
    # It answers as soon as its parent process has printed where.
    said = subprocess.run(["ssh-agent", "-s", "-a", socket], capture_output=True, text=True, check=True).stdout
    pid = said.partition("SSH_AGENT_PID=")[2].partition(";")[0]
    monkeypatch.setenv("SSH_AUTH_SOCK", socket)
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = os.environ | {"SSH_AUTH_SOCK": socket, "SSH_AGENT_PID": pid}
    try:
        subprocess.run(["ssh-add", "-q", str(tmp_path / "lab")], check=True, env=environment)
        yield socket
    finally:
        subprocess.run(["ssh-agent", "-k"], check=True, env=environment, capture_output=True)


@pytest.mark.parametrize("kind", ["sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"])
def test_a_key_on_a_hardware_token_is_said_to_be_one(tmp_path: pathlib.Path, kind: str) -> None:
    """The error names the token's key type and the agent as the way."""
    path = write_token_key(tmp_path / "id_sk", kind)
    with pytest.raises(UsageError, match=f"on a hardware token .{kind}.") as caught:
        load_user_keys([path])
    assert f"ssh-add {path}" in caught.value.hint


def test_a_public_half_names_a_key_of_the_agent(agent: str, tmp_path: pathlib.Path) -> None:
    """A .pub file, from the configuration or the registration, selects the agent's key of which it is the half."""
    public = tmp_path / "lab.pub"
    assert public.stat().st_mode & 0o077
    other = tmp_path / "other.pub"
    other.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0mS8gm1BBdJ4mZkxaBeQvRkOLDpTPRvxiwMEx4Qd3r other\n")
    for address in (
        to_ssh_address(Ssh("nano", "u", identity_file=str(public))),
        to_ssh_address(Ssh("nano", "u"), str(public)),
    ):
        files = (address.key_file, *address.more_keys)
        [key] = load_user_keys(files, address.agent, address.only_these_keys)
        assert key.name == f"of the agent {agent}"
    with pytest.raises(UsageError, match=r"other\.pub is the public half of a key, and no agent holds") as caught:
        load_user_keys([other], agent, only_these=True)
    assert "chmod" not in caught.value.hint
    private = to_ssh_address(Ssh("nano", "u", identity_file=str(tmp_path / "lab")))
    assert private.agent == ""


@pytest.mark.parametrize("user", ["jane.doe", "Jane", "LAB\\jane", "jane@lab", "svc$", "jörg", "jane doe"])
def test_users_are_as_openssh_takes_them(user: str) -> None:
    """A fleet file and the command line take every user that OpenSSH's client takes."""
    assert Variables(user=user).user == parse_user(user) == user


@pytest.mark.parametrize("user", ["", "-x", "jane;id", "a`b", "a|b", "jane -x", "jane\\", "jane\n"])
def test_users_that_openssh_refuses(user: str) -> None:
    """What could be an option or a part of a shell's command is refused."""
    with pytest.raises(ValueError, match="is no user name"):
        parse_user(user)
