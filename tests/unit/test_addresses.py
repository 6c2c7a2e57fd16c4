"""Which key a board is shown, and where."""

from __future__ import annotations

import contextlib
import getpass
import pathlib

import pytest

from farm.cli import board_remote, first_contact
from farm.connectivity.host_keys import HostKey, KnownHosts, UnknownHostKeyError
from farm.connectivity.ssh_config import copy_without_programs, split_jump, to_ssh_address
from farm.errors import UsageError
from farm.services.board_doctor import describe_board
from farm.store import Store
from farm.values import Ssh
from tests.board_rows import make_row

BOARD = Ssh("nano-01.lan", "farm", 2222, host_key="SHA256:" + "A" * 43)
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


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FARM_SSH_KEY", raising=False)
    monkeypatch.delenv("FARM_SSH_CONFIG", raising=False)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


def test_the_key_of_a_board_goes_from_the_nearest_to_the_usual(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~` is the home folder of the user who runs the farm; host, user, port and pinned key are passed on.
    FARM_SSH_KEY, or what the caller names in its place.
    """
    address = to_ssh_address(Ssh(BOARD.host, "farm", 2222, "~/keys/farm", BOARD.host_key), "/other")
    assert (address.host, address.user, address.port) == ("nano-01.lan", "farm", 2222)
    assert (address.key_file, address.host_key) == (home / "keys/farm", BOARD.host_key)
    monkeypatch.setenv("FARM_SSH_KEY", "~/farm_key")
    assert to_ssh_address(BOARD).key_file == home / "farm_key"
    assert to_ssh_address(BOARD, "/other").key_file == pathlib.Path("/other")


def test_without_any_openssh_s_usual_keys_are_taken(home: pathlib.Path) -> None:
    """The first that is there, in OpenSSH's order; with none, the first is named, so that the error can say so."""
    assert to_ssh_address(BOARD).key_file == home / ".ssh/id_ed25519"
    for name in ("id_rsa", "id_ecdsa", "id_ed25519"):
        (home / ".ssh" / name).touch()
        assert to_ssh_address(BOARD).key_file == home / ".ssh" / name


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
    shown = describe_board(make_row("n1", transport={"kind": "ssh", "host": "nano-01.lan", "user": ""}))
    assert "ssh pi@10.0.0.5:2022 (nano-01.lan in OpenSSH's configuration) through keeper@203.0.113.7:2200" in str(shown)
    named = to_ssh_address(Ssh("nano-01.lan", "farm", 2222, "~/keys/farm"))
    assert (named.user, named.port, named.key_file, named.agent) == ("farm", 2222, home / "keys/farm", "")
    assert to_ssh_address(Ssh("elsewhere", "")).endpoint == ""


def test_host_keys_are_confirmed_and_forgotten_where_they_are_pinned(home: pathlib.Path) -> None:
    """At the port of OpenSSH's configuration; what is advised is a command that has the option."""
    (home / ".ssh/config").write_text(CONFIG)
    board, key = Ssh("nano-01.lan", ""), HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519")
    known_hosts = KnownHosts(home / "known_hosts")
    known_hosts.add("nano-01.lan", 2022, key)
    with Store(home / "farm.db") as store:
        board_remote._forget(store, known_hosts, "n1", board)
    assert not known_hosts.find("nano-01.lan", 2022)
    with pytest.raises(UnknownHostKeyError) as caught:
        first_contact._require_confirmed(["n1"], to_ssh_address(board), key, (), None)
    assert caught.value.hint.endswith(f" trust n1 --fingerprint {key.fingerprint}, or host_key in a fleet file.")


@pytest.mark.parametrize(("host", "said"), [("ring", "circle|loop"), ("odd", "ProxyCommand")])
def test_what_is_not_taken_over_is_refused(home: pathlib.Path, host: str, said: str) -> None:
    """A way that leads back to itself, and programs that OpenSSH would run."""
    (home / ".ssh/config").write_text(CONFIG)
    with pytest.raises(UsageError, match=said):
        to_ssh_address(Ssh(host, "u"))


@pytest.mark.parametrize(
    "line",
    [
        "Match exec {touch}",
        "  match !EXEC={touch}",
        "Match host nano-*,tx2 exec {touch}",
        'M"atch" e"x"ec {touch}',
        "Match final exec {touch}",
    ],
)
@pytest.mark.parametrize("included", [False, True])
def test_no_program_of_a_configuration_runs(
    home: pathlib.Path, tmp_path: pathlib.Path, line: str, included: bool
) -> None:
    """`Match exec`, however it is written, is refused with its file and line before anything reads the file."""
    ran = tmp_path / "ran"
    program = f'"touch {ran}"'
    path = home / ".ssh/config"
    if included:
        path.write_text(f"Include {tmp_path}/*.conf\n")
        path = tmp_path / "more.conf"
    path.write_text(f"# lab\nUser pi\n{line.format(touch=program)}\n Port 2200\n")
    with pytest.raises(UsageError, match=":3: `Match exec` runs a program"):
        to_ssh_address(Ssh("nano-01", ""))
    assert not ran.exists()


@pytest.mark.parametrize(
    "include", ["~/f1.conf", "f[12].conf", "{home}/f1.conf", "~root/x", "f[[:digit:]].conf", "$X/f"]
)
def test_openssh_reads_only_what_was_searched(home: pathlib.Path, tmp_path: pathlib.Path, include: str) -> None:
    """Whichever way a file is included, OpenSSH gets copies of searched files alone, and no program runs."""
    for folder in (home, home / ".ssh"):
        (folder / "f1.conf").write_text(f'Match exec "touch {home}/ran"\n')
    config = home / ".ssh/config"
    config.write_text(f"Include {include.format(home=home)}\n")
    with contextlib.suppress(UsageError):
        to_ssh_address(Ssh("nano-01", ""))
        assert copy_without_programs(config, tmp_path).read_text() == "\n"
    assert not (home / "ran").exists()


def test_openssh_reads_its_configuration(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Include, criteria, tokens, variables and IPv6 hosts on the way are as OpenSSH has them."""
    monkeypatch.setenv("LAB", "rack 1")
    (home / "more").write_text("Host nano-*\n HostName %h.lab\n Port 2022\n")
    (home / ".ssh/config").write_text(
        f"Include {home}/more\n"
        "Match originalhost nano-01 user jane\n IdentityFile %d/keys/%%-%r@%h-%n-${LAB}\n"
        "Match user guest\n Port 9\n"
        "Host nano-*\n User pi\n ProxyJump keeper@[fe80::1]:2200,[fe80::2]\n CanonicalizeHostname yes\n"
    )
    address = to_ssh_address(Ssh("nano-01", "jane"))
    assert (address.endpoint, address.port, address.user) == ("nano-01.lab", 2022, "jane")
    assert address.key_file == home / "keys/%-jane@nano-01.lab-nano-01-rack 1"
    assert [(each.user, each.host, each.port) for each in address.jumps] == [
        ("keeper", "fe80::1", 2200),
        (getpass.getuser(), "fe80::2", 22),
    ]
    other = to_ssh_address(Ssh("nano-02", ""))
    assert (other.user, other.key_file) == ("pi", home / ".ssh/id_ed25519")


def test_a_configuration_that_openssh_refuses(home: pathlib.Path) -> None:
    """The error has OpenSSH's own words, with the line."""
    (home / ".ssh/config").write_text("Host a\n Prot 22\n")
    with pytest.raises(UsageError, match="line 2: Bad configuration option: prot"):
        to_ssh_address(Ssh("a", ""))


def test_without_openssh_s_client_no_configuration_is_read(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed: the error says what to install. Without a configuration none is needed."""
    monkeypatch.setenv("PATH", str(home / "nothing"))
    assert to_ssh_address(Ssh("a", "ann")).endpoint == ""
    (home / ".ssh/config").write_text("Host a\n Port 2022\n")
    with pytest.raises(UsageError, match="OpenSSH's configuration cannot be read") as refused:
        to_ssh_address(Ssh("a", ""))
    assert "Install OpenSSH's client" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gate", ("", "gate", None)),
        ("jane.doe@gate:2200", ("jane.doe", "gate", 2200)),
        ("ssh://k@[fe80::1]:2200", ("k", "fe80::1", 2200)),
        ("[10.0.0.1]:23", ("", "10.0.0.1", 23)),
        ("k@fe80::1", ("k", "fe80::1", None)),
    ],
)
def test_a_host_on_the_way(text: str, parts: tuple[str, str, int | None]) -> None:
    """User, host and port as OpenSSH writes them, IPv6 addresses with and without brackets."""
    assert split_jump(text) == parts


@pytest.mark.parametrize("text", ["", "k@", "gate:ssh", "[fe80::1", "gate:22:23", "[]"])
def test_a_host_on_the_way_that_is_none(text: str) -> None:
    """What is no host is refused."""
    with pytest.raises(UsageError, match=r"is not \[user@\]host\[:port\]"):
        split_jump(text)
