"""Which key a board is shown, and where."""

from __future__ import annotations

import pathlib

import pytest

from farm.connectivity.addresses import to_ssh_address
from farm.errors import UsageError
from farm.values import Ssh

BOARD = Ssh("nano-01.lan", "farm", 2222, host_key="SHA256:" + "A" * 43)


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A home folder with an empty `.ssh`, and no key set for the farm."""
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FARM_SSH_KEY", raising=False)
    monkeypatch.delenv("FARM_SSH_CONFIG", raising=False)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


def test_a_registered_key_goes_before_every_default(home: pathlib.Path) -> None:
    """`~` is the home folder of whoever runs the farm; host, user, port and pinned key are passed on."""
    address = to_ssh_address(Ssh(BOARD.host, "farm", 2222, "~/keys/farm", BOARD.host_key), "/other")
    assert (address.host, address.user, address.port) == ("nano-01.lan", "farm", 2222)
    assert (address.key_file, address.host_key) == (home / "keys/farm", BOARD.host_key)


def test_the_farms_key_is_for_boards_without_one(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FARM_SSH_KEY, or what the caller names in its place."""
    monkeypatch.setenv("FARM_SSH_KEY", "~/farm_key")
    assert to_ssh_address(BOARD).key_file == home / "farm_key"
    assert to_ssh_address(BOARD, "/other").key_file == pathlib.Path("/other")


def test_without_any_openssh_s_usual_keys_are_taken(home: pathlib.Path) -> None:
    """The first that is there, in OpenSSH's order; with none, the first is named, so that the error can say so."""
    assert to_ssh_address(BOARD).key_file == home / ".ssh/id_ed25519"
    for name in ("id_rsa", "id_ecdsa", "id_ed25519"):
        (home / ".ssh" / name).touch()
        assert to_ssh_address(BOARD).key_file == home / ".ssh" / name


CONFIG = """
Host gate
    HostName 203.0.113.7
    User keeper
    Port 2200
Host nano-*
    ProxyJump gate
    IdentityFile ~/.ssh/lab
    IdentitiesOnly yes
Host nano-01.lan
    HostName 10.0.0.5
    Port 2022
    User pi
Host ring
    ProxyJump ring
Host odd
    ProxyCommand nc %h %p
"""


def test_what_is_left_open_openssh_s_configuration_says(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, user, port, keys and the hosts on the way; what the registration says goes before it."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    (home / ".ssh/config").write_text(CONFIG)
    (home / ".ssh/lab").touch()
    address = to_ssh_address(Ssh("nano-01.lan", ""))
    assert (address.host, address.endpoint, address.user, address.port) == ("nano-01.lan", "10.0.0.5", "pi", 2022)
    assert (address.key_file, address.only_these_keys, address.agent) == (home / ".ssh/lab", True, "/run/agent")
    [gate] = address.jumps
    assert (gate.host, gate.endpoint, gate.user, gate.port) == ("gate", "203.0.113.7", "keeper", 2200)
    named = to_ssh_address(Ssh("nano-01.lan", "farm", 2222, "~/keys/farm"))
    assert (named.user, named.port, named.key_file, named.agent) == ("farm", 2222, home / "keys/farm", "")
    assert to_ssh_address(Ssh("elsewhere", "")).endpoint == ""


@pytest.mark.parametrize(("host", "said"), [("ring", "circle"), ("odd", "ProxyCommand")])
def test_what_is_not_taken_over_is_refused(home: pathlib.Path, host: str, said: str) -> None:
    """A way that leads back to itself, and programs that OpenSSH would run."""
    (home / ".ssh/config").write_text(CONFIG)
    with pytest.raises(UsageError, match=said):
        to_ssh_address(Ssh(host, "u"))
