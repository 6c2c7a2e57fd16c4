"""Fleet files: what they may say, what is said when they are wrong, and what must happen to agree with one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import time
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.errors import UsageError
from farm.inventory import fleet_addresses, fleet_document
from farm.inventory.board_types import BoardType, load_board_types
from farm.inventory.fleet_plan import FieldChange, HeldBack, RegisteredBoard, plan
from farm.inventory.fleets import Fleet, FleetBoard, read_fleet
from farm.store.standing import parse_transport, to_document
from farm.values import Direct, Ssh, Virtual

ROOT = pathlib.Path(__file__).parents[2]

GOOD = """\
vars: {transport: ssh, user: farm, key_file: ~/.ssh/farm, labels: {site: lab}}
groups:
  nanos:
    vars:
      type: jetson-nano
      labels: {rack: "1"}
    hosts:
      nano-1:
        address: 192.0.2.11
      nano-2:
        address: 192.0.2.12
        labels: {rack: "2"}
  sim:
    vars:
      transport: virtual
      type: jetson-tx2
    hosts:
      tx2:
        seed: 7
"""
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["ssh", "direct", "virtual", "jetson-nano", "local", "a[1:3]", "[", "192.0.2.[1:2]", "~/k", "farm"]
    ),
)
_KEYS = st.sampled_from(
    [
        "vars", "hosts", "groups", "type", "transport", "address", "port", "user", "key_file", "labels", "seed",
        "faults", "count", "a[1:3]", "b",
    ]
) | st.text(max_size=3)  # fmt: skip
_TREES = st.recursive(_VALUES, lambda inner: st.dictionaries(_KEYS, inner, max_size=5) | st.lists(inner, max_size=3))
SSH = Ssh("192.0.2.1", "farm")
_NAMES = st.sampled_from("abcdef")
_LABELS = st.dictionaries(st.sampled_from(["rack", "site"]), st.sampled_from(["1", "2"]))
_TYPES = st.sampled_from(["jetson-nano", "jetson-tx2"])
_LEASED = st.none() | st.just("x")


@pytest.fixture(scope="module")
def types() -> dict[str, BoardType]:
    """The farm's own board types, read once."""
    return load_board_types()


def read(folder: pathlib.Path, text: str, types: dict[str, BoardType]) -> Fleet:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return read_fleet(path, types)


def ssh(board: FleetBoard) -> Ssh:
    assert isinstance(board.transport, Ssh)
    return board.transport


def hosts(text: str, variables: str = "transport: virtual, type: jetson-nano") -> str:
    return f"vars: {{{variables}}}\nhosts: {{{text}}}\n"


# Ranges


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("nano", ["nano"]),
        ("nano-[1:3]", ["nano-1", "nano-2", "nano-3"]),
        ("nano-[08:11]", ["nano-08", "nano-09", "nano-10", "nano-11"]),
        ("[0:2]", ["0", "1", "2"]),
        ("n[1:7:3]x", ["n1x", "n4x", "n7x"]),
        ("n[1:8:3]", ["n1", "n4", "n7"]),
        ("n[5:5]", ["n5"]),
        ("rack-[a:c]", ["rack-a", "rack-b", "rack-c"]),
        ("r[a:b]n[1:2]", ["ran1", "ran2", "rbn1", "rbn2"]),
    ],
)
def test_range(pattern: str, names: list[str]) -> None:
    """Ranges mean what they mean in Ansible."""
    assert fleet_document.expand(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("n[1:1001]", r"'n\[1:1001\]' stands for 1001; at most 1000"),
        ("n[1:999999999999]", "at most 1000"),
        ("n[1:100][1:100]", "stands for 10000"),
        ("n[1:1" + "0" * 5000 + "]", "more than 12 digits"),
        ("n[3:1]", "ends before it begins"),
        ("n[01:100]", "as many digits"),
        ("n[1:3:0]", "step '0'"),
        ("n[1:3:-1]", "step '-1'"),
        ("n[1:]", r"must be \[first:last\]"),
        ("n[1]", r"must be \[first:last\]"),
        ("n[1:2:3:4]", r"must be \[first:last\]"),
        ("n[a:3]", "from a number to a number, or from a letter to a letter"),
        ("n[a:C]", "from a letter to a letter"),
        ("n[1-3:4]", "from a number"),
        ("n[١:٣]", "from a number"),
        ("n[1:3", "without its partner"),
        ("n1:3]", "without its partner"),
        ("n[[1:3]]", "without its partner"),
    ],
)
def test_wrong_range(pattern: str, message: str) -> None:
    """A range that is too long or means nothing is refused before it takes any time or memory."""
    since = time.monotonic()
    with pytest.raises(ValueError, match=message):
        fleet_document.expand(pattern)
    assert time.monotonic() - since < 1


@given(st.integers(0, 10**9), st.integers(0, 999), st.integers(1, 50))
def test_range_has_what_it_counts(first: int, more: int, step: int) -> None:
    """Every name is distinct, the first is there, and none is beyond the last."""
    names = fleet_document.expand(f"n[{first}:{first + more}:{step}]")
    numbers = [int(name[1:]) for name in names]
    assert numbers == list(range(first, first + more + 1, step))


def test_numbered_names_sort() -> None:
    """Several boards of one name get numbers that sort as text."""
    assert fleet_document.number("sim", 3) == ["sim-1", "sim-2", "sim-3"]
    assert list(fleet_document.number("sim", 12)) == sorted(fleet_document.number("sim", 12))


# Addresses


@pytest.mark.parametrize("text", ["nano-1", "nano-1.example.com", "192.0.2.7", "2001:db8::7", "fe80::1%eth0", "a_b"])
def test_address(text: str) -> None:
    """Names and addresses of both kinds are taken as they are."""
    assert fleet_addresses.parse_address(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "farm@nano", "192.0.2.7:22", "192.0.2.300", "1234", "-oProxyCommand=x", "a b", "a..b", "a/b", "x" * 300],
)
def test_wrong_address(text: str) -> None:
    """Every invalid address is refused, above all what a program could take for an option."""
    with pytest.raises(ValueError, match="is no"):
        fleet_addresses.parse_address(text)


@pytest.mark.parametrize("text", ["0", "65536", "-1", "ssh", "", "9" * 5000, "22.0"])
def test_wrong_port(text: str) -> None:
    """Ports are whole numbers from 1 to 65535."""
    with pytest.raises(ValueError, match="is no port"):
        fleet_addresses.parse_port(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [("localhost", "127.0.0.1"), ("Nano-1.Example.com.", "nano-1.example.com"), ("2001:db8:0::7", "2001:db8::7")],
)
def test_same_address(one: str, other: str) -> None:
    """Two spellings of one address compare equal."""
    assert fleet_addresses.canonical(one) == fleet_addresses.canonical(other)


# Reading


def test_variables_are_inherited(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """What stands further inside wins; labels are joined one by one; variables of another transport do no harm."""
    one, two, tx2 = read(tmp_path, GOOD, types).boards
    assert one.transport == Ssh("192.0.2.11", "farm", 22, "~/.ssh/farm", "", agent_port=9090, tracker_port=9190)
    assert (one.name, one.board_type, one.labels) == ("nano-1", "jetson-nano", {"site": "lab", "rack": "1"})
    assert two.labels == {"site": "lab", "rack": "2"}
    assert (tx2.board_type, tx2.transport) == ("jetson-tx2", Virtual(7))


def test_groups_in_groups(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """Groups nest to any depth, an empty one does no harm, and null takes away what an outer group said."""
    text = """\
vars: {transport: virtual, type: jetson-nano, seed: 3}
groups:
  a:
    groups:
      b:
        vars: {type: jetson-tx2}
        groups:
          c: {vars: {seed: null}, hosts: {deep: }}
        hosts: {middle: }
  empty:
hosts: {outer: }
"""
    assert {board.name: (board.board_type, board.transport) for board in read(tmp_path, text, types).boards} == {
        "outer": ("jetson-nano", Virtual(3)),
        "middle": ("jetson-tx2", Virtual(3)),
        "deep": ("jetson-tx2", Virtual(0)),
    }


def test_ranges_of_hosts(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """Names, addresses and ports of a range go together one by one; without an address the name is one."""
    text = """\
vars: {transport: ssh, type: jetson-nano, user: farm, key_file: k}
hosts:
  nano-[01:03]: {address: "192.0.2.[21:23]"}
  far-[1:2]: {address: gate.example.com, port: "22[01:02]"}
  near-[1:2]:
"""
    boards = read(tmp_path, text, types).boards
    assert [(board.name, ssh(board).host, ssh(board).port) for board in boards] == [
        ("nano-01", "192.0.2.21", 22),
        ("nano-02", "192.0.2.22", 22),
        ("nano-03", "192.0.2.23", 22),
        ("far-1", "gate.example.com", 2201),
        ("far-2", "gate.example.com", 2202),
        ("near-1", "near-1", 22),
        ("near-2", "near-2", 22),
    ]


def test_virtual_boards_differ(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """Virtual boards of one entry have seeds that follow each other, whether by range or by count."""
    boards = read(tmp_path, hosts('"a[1:2]": {seed: 5}, b: {count: 3}'), types).boards
    assert {board.name: board.transport for board in boards} == {
        "a1": Virtual(5),
        "a2": Virtual(6),
        "b-1": Virtual(0),
        "b-2": Virtual(1),
        "b-3": Virtual(2),
    }


def test_virtual_boards_may_be_harmed_or_live(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """Faults are the board's own, are shown with it, and come back from the store as they went in. Live boards are
    shown as such and come back from the store; lapsed ones, the default, need no word.
    """
    [board] = read(tmp_path, hosts('a: {faults: ["slow:1.3@60", "hang@90"]}'), types).boards
    assert board.transport == Virtual(0, ("slow:1.3@60", "hang@90"))
    assert board.where == "virtual, seed 0, fault slow:1.3@60, fault hang@90"
    assert parse_transport(to_document(board.transport)) == board.transport
    assert to_document(Virtual(1)) == {"kind": "virtual", "seed": 1}
    live, lapsed, default = read(tmp_path, hosts("a: {time: live}, b: {time: lapsed}, c: "), types).boards
    assert (live.transport, live.where) == (Virtual(0, live=True), "virtual, seed 0, live")
    assert parse_transport(to_document(live.transport)) == live.transport
    assert lapsed.transport == default.transport == Virtual(0)


def test_direct_board(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """A board on this machine needs no more than its agent's port, and not even that where the tracker says it."""
    text = hosts("here: {port: 9091}, there: ", "transport: direct, type: local")
    assert [board.transport for board in read(tmp_path, text, types).boards] == [Direct(9091), Direct(None)]


def test_key_file_is_found_from_elsewhere(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """A relative path is taken from the file's own folder, with any later working directory."""
    text = hosts(
        "a: {key_file: keys/a}, b: {key_file: ~/b}, c: {key_file: /c}", "transport: ssh, type: jetson-nano, user: u"
    )
    paths = [ssh(board).identity_file for board in read(tmp_path, text, types).boards]
    assert paths == [str(tmp_path / "keys" / "a"), "~/b", "/c"]


def test_example_is_good(types: dict[str, BoardType]) -> None:
    """The example fleet reads, and shows all that can be said."""
    boards = read_fleet(ROOT / "inventory" / "fleet.example.yaml", types).boards
    assert {board.transport.kind for board in boards} >= {"ssh", "virtual"}
    assert len(boards) == 27


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Keys and values
        (
            ("address: 192.0.2.11", "adress: 192.0.2.11"),
            r"line 9: unknown key .*nano-1\.adress; did you mean address\?",
        ),
        (("    hosts:\n      nano-1", "    host:\n      nano-1"), r"line 7: unknown key .*host; did you mean hosts\?"),
        (("groups:\n  nanos", "group:\n  nanos"), r"line 2: unknown key group; did you mean groups\?"),
        (("user: farm", "username: farm"), r"line 1: unknown key vars\.username; did you mean user\?"),
        (("seed: 7", "password: x"), r"line 19: unknown key .*tx2\.password; known: type, transport"),
        (("seed: 7", "seed: -7"), r"line 19: .*seed: .*at least 0"),
        (("seed: 7", "seed: 1.5"), r"line 19: .*seed: .*whole number"),
        (("seed: 7", "count: 0"), r"line 19: .*count: .*at least 1"),
        (("transport: ssh", "transport: telnet"), r"line 1: vars\.transport: .*'ssh', 'direct' or 'virtual'"),
        (("user: farm", "user: 'farm;id'"), r"line 1: vars\.user: .*'farm;id' is no user name"),
        (("user: farm", "user: -x"), r"line 1: vars\.user: .*'-x' is no user name"),
        (("labels: {site: lab}", "labels: {site: 10}"), r"line 1: vars\.labels\.site: .*write it in quotes"),
        (("labels: {site: lab}", "labels: {site: 010}"), r"line 1 .*base 8 .*quote a text"),
        (("address: 192.0.2.11", "port: 02201"), r"line 9 .*02201 is a number of base 8 in YAML \(1153\)"),
        (("address: 192.0.2.11", "port: 22:01"), r"line 9 .*22:01 is a number of base 60 in YAML \(1321\)"),
        (("labels: {site: lab}", "labels: {Site: lab}"), r"line 1: vars\.labels\.Site"),
        (("labels: {site: lab}", "labels: [site]"), r"line 1: vars\.labels: .*keys and values"),
        (("labels: {site: lab}", "host_key: SHA256:short"), r"line 1: vars\.host_key: .*match"),
        (("~/.ssh/farm", '"-----BEGIN OPENSSH PRIVATE KEY-----"'), r"line 1: vars\.key_file: a path is needed"),
        (("~/.ssh/farm", '"a\\x1b[2J"'), r"line 1: vars\.key_file: .*cannot be printed"),
        (("labels: {site: lab}", 'labels: {site: "a\\nb"}'), r"line 1: vars\.labels\.site: .*cannot be printed"),
        (("      nano-2:\n", "      nano-1:\n"), r"line 10 is not good YAML: the key 'nano-1' is given twice"),
        (("      nano-2:\n", "      12:\n"), r"line 10: .*write it in quotes"),
        (("address: 192.0.2.11", "port: [22]"), r"line 9: .*port: a port is a whole number"),
        (("address: 192.0.2.11", "port: yes"), r"line 9: .*port: a port is a whole number"),
        # What they mean
        (
            ("type: jetson-nano", "type: jetson-nanu"),
            r"line 5: unknown board type 'jetson-nanu'. Did you mean jetson-nano\?",
        ),
        (("type: jetson-tx2", "type: local"), r"line 16: boards of the type local cannot be virtual"),
        (("type: jetson-nano", "type: local"), r"line 5: the type local is this machine itself"),
        (("192.0.2.12", "192.0.2.11"), r"line 10: nano-2 is at 192\.0\.2\.11:22, and so is nano-1"),
        (("192.0.2.12", "192.0.2.11:2222"), r"line 11: '192\.0\.2\.11:2222' is no IP address; user and port have"),
        (("192.0.2.12", "root@nano-2"), r"line 11: 'root@nano-2' is no host name"),
        (("192.0.2.12", '"192.0.2.[12:13]"'), r"line 11: address .* stands for 2, but the boards are 1"),
        (("address: 192.0.2.12", "port: 70000"), r"line 11: '70000' is no port"),
        (("address: 192.0.2.12", "seed: 2"), r"line 11: nano-2: seed means nothing for a board that is ssh"),
        (("address: 192.0.2.12", "count: 2"), r"line 11: nano-2: count multiplies virtual boards"),
        (("seed: 7", "port: 7"), r"line 19: tx2: port means nothing for a board that is virtual"),
        (("      tx2:\n", "      nano-1:\n"), r"line 18: a board called nano-1 is already described"),
        (("      tx2:\n", "      nano-[1:2]:\n"), r"line 18: a board called nano-[12] is already described"),
        (("      tx2:\n", "      t[1:2000]:\n"), r"line 18: 't\[1:2000\]' stands for 2000; at most 1000"),
        (("      tx2:\n", "      -tx2:\n"), r"line 18: '-tx2' cannot be a board's name"),
        (("      tx2:\n", "      tx2/1:\n"), r"line 18: 'tx2/1' cannot be a board's name"),
        (("transport: ssh, ", ""), r"line 8: nano-1 has no transport"),
        (("      type: jetson-tx2\n", ""), r"line 17: tx2 has no type"),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, types: dict[str, BoardType], change: tuple[str, str], message: str) -> None:
    """Each mistake is named with its file, line and key, and where there is a near name it is suggested."""
    assert change[0] in GOOD
    with pytest.raises(UsageError, match=message) as raised:
        read(tmp_path, GOOD.replace(*change, 1), types)
    assert all(line.startswith(str(tmp_path / "fleet.yaml")) for line in raised.value.message.splitlines())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold keys and values"),
        ("vars: {}\n", "describes no board"),
        ("groups: {a: , b: }\n", "describes no board"),
        ("a: &a {groups: *a}\n", "fleet.yaml"),
        ("groups: &a {b: {groups: *a}}\n", "recursion|cycl"),
        (hosts('"s[1:100]": {count: 100}'), "more than 1000 boards"),
        ("groups: " + "{a: {groups: " * 3000 + "}}" * 3000 + "\n", "nests too deep"),
        (hosts("2024-13-01: "), "is not good YAML: month must be in"),
        (hosts("a: {seed: 1" + "0" * 5000 + "}"), "is not good YAML: .*digits"),
        (hosts('"n[1:11][1:11]": '), "line 2: a board called n111 is already described"),
        (hosts("2024-01-01: "), r"line 2: .*write it in quotes"),
    ],
)
def test_odd_file(tmp_path: pathlib.Path, types: dict[str, BoardType], text: str, message: str) -> None:
    """Files that say nothing, or too much, are refused in plain words as well."""
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text, types)


def test_mistakes_are_told_together_and_once(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """Mistakes of both kinds are reported together with others of their kind, in the order of their lines. A wrong
    variable of a group is one mistake, however many boards inherit it; and there is an end to the list.
    """
    text = GOOD.replace("192.0.2.11", "x@y").replace("type: jetson-tx2", "type: tx9")
    with pytest.raises(UsageError) as raised:
        read(tmp_path, text, types)
    lines = raised.value.message.splitlines()
    assert [line.split(" line ")[1].split(":")[0] for line in lines] == ["9", "16"]
    wrong_type = "vars: {transport: virtual, type: nonsense}\nhosts:\n" + "".join(f"  b{i}:\n" for i in range(50))
    with pytest.raises(UsageError) as raised:
        read(tmp_path, wrong_type, types)
    assert len(raised.value.message.splitlines()) == 1
    with pytest.raises(UsageError, match="30 more mistakes") as raised:
        read(tmp_path, wrong_type.replace("type: nonsense", "seed: 1"), types)
    assert len(raised.value.message.splitlines()) == 21


def test_a_thousand_boards_are_read_quickly(tmp_path: pathlib.Path, types: dict[str, BoardType]) -> None:
    """Reading and planning for a thousand boards that are written one by one takes moments."""
    text = "vars: {transport: ssh, type: jetson-nano, user: u, key_file: k}\nhosts:\n" + "".join(
        f"  n{i}: {{address: 10.0.{i // 250}.{i % 250}, labels: {{rack: '{i}'}}}}\n" for i in range(1000)
    )
    since = time.monotonic()
    fleet = read(tmp_path, text, types)
    assert len(plan([], fleet).added) == 1000
    assert time.monotonic() - since < 10


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.dictionaries(_KEYS, _VALUES, max_size=6),
    st.dictionaries(_KEYS, st.none() | st.dictionaries(_KEYS, _VALUES, max_size=6), max_size=4),
    _TREES,
)
def test_any_file_is_read_or_refused(
    tmp_path: pathlib.Path,
    types: dict[str, BoardType],
    variables: dict[str, Any],
    described: dict[str, Any],
    groups: Any,
) -> None:
    """Any content of a file is a fleet or an error in our words; never anything else."""
    text = yaml.safe_dump({"vars": variables, "hosts": described, "groups": groups})
    with contextlib.suppress(UsageError):
        boards = read(tmp_path, text, types).boards
        assert len({board.name for board in boards}) == len(boards)


# Planning


def describe(name: str, **changes: Any) -> FleetBoard:
    return dataclasses.replace(FleetBoard(name, "jetson-nano", SSH, {"rack": "1"}), **changes)


def register(name: str, leased_by: str | None = None, **changes: Any) -> RegisteredBoard:
    board = RegisteredBoard(name, "jetson-nano", SSH, {"rack": "1"}, leased_by)
    return dataclasses.replace(board, **changes)


def fleet_of(*boards: FleetBoard) -> Fleet:
    return Fleet(pathlib.Path("fleet.yaml"), boards)


def test_a_plan_adds_and_removes_what_it_is_told_to() -> None:
    """Everything is added, in the order of the file. A board that the file does not name stays, unless the caller
    prunes. A board that stays registered keeps its address for itself; one that is pruned gives it up.
    """
    todo = plan([], fleet_of(describe("b"), describe("a")))
    assert [board.name for board in todo.added] == ["b", "a"]
    assert not todo.is_empty
    current, wanted = [register("b"), register("a"), register("c")], fleet_of(describe("b"))
    todo = plan(current, wanted)
    assert (todo.unlisted, todo.removed, todo.unchanged) == (("a", "c"), (), ("b",))
    assert todo.is_empty
    todo = plan(current, wanted, prune=True)
    assert (todo.unlisted, todo.removed) == ((), ("a", "c"))
    current, wanted = [register("old")], fleet_of(describe("new"))
    with pytest.raises(UsageError, match=r"new would be at 192\.0\.2\.1:22, and so is old"):
        plan(current, wanted)
    assert [board.name for board in plan(current, wanted, prune=True).added] == ["new"]


def test_plan_says_which_fields_differ() -> None:
    """A change names each field with its old and new value, in either direction, and nothing else."""
    wanted = describe(
        "a", board_type="jetson-tx2", transport=dataclasses.replace(SSH, port=2222), labels={"site": "lab"}
    )
    (change,) = plan([register("a")], fleet_of(wanted)).changed
    assert change.board is wanted
    assert change.fields == (
        FieldChange("type", "jetson-nano", "jetson-tx2"),
        FieldChange("transport.port", 22, 2222),
        FieldChange("labels.site", None, "lab"),
        FieldChange("labels.rack", "1", None),
    )


def test_leased_boards_are_left_alone() -> None:
    """Who holds a board keeps it as it is: it is neither removed nor reached otherwise; a label may change."""
    current = [register(name, "campaign 7") for name in ("gone", "moved", "other-type", "labelled", "same")]
    wanted = fleet_of(
        describe("moved", transport=dataclasses.replace(SSH, host="192.0.2.9")),
        describe("other-type", board_type="jetson-tx2"),
        describe("labelled", labels={"rack": "9"}),
        describe("same"),
    )
    todo = plan(current, wanted, prune=True)
    assert todo.held_back == (
        HeldBack("moved", "change", "campaign 7"),
        HeldBack("other-type", "change", "campaign 7"),
        HeldBack("gone", "remove", "campaign 7"),
    )
    assert [change.board.name for change in todo.changed] == ["labelled"]
    assert (todo.removed, todo.unchanged) == ((), ("same",))


def test_confirmed_host_key_is_kept() -> None:
    """A file without a host key forgets none that was confirmed, unless the board is somewhere else now."""
    pinned = dataclasses.replace(SSH, host_key="SHA256:confirmed")
    current = [register("a", transport=pinned)]
    assert plan(current, fleet_of(describe("a", transport=SSH))).unchanged == ("a",)
    (change,) = plan(current, fleet_of(describe("a", transport=dataclasses.replace(SSH, user="other")))).changed
    assert change.board.transport == dataclasses.replace(pinned, user="other")
    (change,) = plan(current, fleet_of(describe("a", transport=dataclasses.replace(SSH, host="192.0.2.2")))).changed
    assert FieldChange("transport.host_key", "SHA256:confirmed", "") in change.fields
    (change,) = plan(
        current, fleet_of(describe("a", transport=dataclasses.replace(SSH, host_key="SHA256:new")))
    ).changed
    assert change.fields == (FieldChange("transport.host_key", "SHA256:confirmed", "SHA256:new"),)


def _place(board: Any) -> Any:
    return dataclasses.replace(board, transport=dataclasses.replace(SSH, host=f"192.0.2.{ord(board.name)}"))


_REGISTERED = st.builds(register, _NAMES, _LEASED, board_type=_TYPES, labels=_LABELS).map(_place)
_DESCRIBED = st.builds(describe, _NAMES, board_type=_TYPES, labels=_LABELS).map(_place)


@given(
    st.lists(_REGISTERED, unique_by=lambda board: board.name),
    st.lists(_DESCRIBED, unique_by=lambda board: board.name),
    st.booleans(),
)
def test_plan_is_complete_and_idempotent(current: list[RegisteredBoard], wanted: list[FleetBoard], prune: bool) -> None:
    """Each board has exactly one fate; a leased one is never removed; once applied, only what was held back is left."""
    fleet = fleet_of(*wanted)
    todo = plan(current, fleet, prune)
    fates = [
        *(board.name for board in todo.added),
        *(change.board.name for change in todo.changed),
        *todo.unchanged,
        *todo.removed,
        *todo.unlisted,
        *(held.name for held in todo.held_back),
    ]
    assert sorted(fates) == sorted({board.name for board in itertools.chain(current, wanted)})
    leased = {board.name for board in current if board.leased_by}
    assert not leased & {*todo.removed}
    new = {board.name: board for board in (*todo.added, *(change.board for change in todo.changed))}
    after = [
        board if board.name not in new else register(board.name, board.leased_by, **_values(new.pop(board.name)))
        for board in current
        if board.name not in todo.removed
    ]
    after += [register(name, **_values(board)) for name, board in new.items()]
    again = plan(after, fleet, prune)
    assert again.is_empty
    assert again.held_back == todo.held_back


def _values(board: FleetBoard) -> dict[str, Any]:
    return {"board_type": board.board_type, "transport": board.transport, "labels": board.labels}
