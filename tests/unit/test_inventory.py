"""Board types: what the farm ships, and what is said when a file is wrong."""

from __future__ import annotations

import pathlib
import re

import pytest

from farm.errors import UsageError
from farm.inventory import board_types, documents

GOOD = """\
name: my-board
title: Mine
target: {kind: llvm, mtriple: aarch64-linux-gnu, mcpu: cortex-a53, num-cores: 2}
link_triple: aarch64-linux-gnu.2.31
clusters:
  - {name: a53, core: cortex-a53, cpus: [0, 1]}
"""


@pytest.fixture(autouse=True)
def only_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(board_types.EXTRA_FOLDER_VARIABLE, raising=False)


def write(folder: pathlib.Path, text: str, name: str = "my-board") -> pathlib.Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return folder


class Pair(documents.StrictModel):
    one: dict[str, int]
    two: dict[str, int]


def test_mappings_merge() -> None:
    """`<<` gives a mapping another's keys, its own come first; growth without bound is refused."""
    where = pathlib.Path("f.yaml")
    found = documents.parse_document("one: &a {x: 1, y: 2}\ntwo: {<<: *a, y: 3}\n", Pair, where)
    assert found.two == {"x": 1, "y": 3}
    bomb = "".join(f"k{at}: &k{at} {{<<: [*k{at - 1}, *k{at - 1}]}}\n" for at in range(1, 40))
    with pytest.raises(UsageError, match=r"line .* it merges more than 10,000 keys"):
        documents.parse_document(f"k0: &k0 {{x: 1}}\n{bomb}", Pair, where)


def test_own_types() -> None:
    """The farm ships these types, and `local` alone is the host."""
    types = board_types.load_board_types()
    assert set(types) == {
        "local", "armv8-a", "x86-64-v3", "jetson-agx-orin-64gb", "jetson-agx-thor", "jetson-agx-xavier", "jetson-nano",
        "jetson-orin-nano-8gb", "jetson-orin-nano-super", "jetson-orin-nx-16gb", "jetson-tx2", "jetson-xavier-nx",
        "raspberry-pi-4", "raspberry-pi-5",
    }  # fmt: skip
    assert [t.name for t in types.values() if t.host_is_board] == ["local"]


def test_what_the_shipped_types_say_of_cores() -> None:
    """`host` leaves target and linker to detection, and no number is invented. The TX2 has six cores, of which TVM's
    threads get the four that the kernel schedules on.
    """
    local = board_types.require_board_type("local")
    assert (local.target, local.link_triple, local.cores, local.memory_bytes) == (None, None, None, None)
    tx2 = board_types.require_board_type("jetson-tx2")
    assert tx2.cores == 6
    assert tx2.target.num_cores == 4


def test_target_is_what_tvm_takes() -> None:
    """The target comes out under TVM's own keys."""
    nano = board_types.require_board_type("jetson-nano")
    assert nano.target.to_tvm() == {
        "kind": "llvm",
        "mtriple": "aarch64-linux-gnu",
        "mcpu": "cortex-a57",
        "mattr": ["+neon"],
        "num-cores": 4,
    }
    assert nano.link_triple == "aarch64-linux-gnu.2.27"


@pytest.mark.parametrize(
    ("typed", "meant"), [("jetson_nano", "jetson-nano"), ("nano", "jetson-nano"), ("Local", "local")]
)
def test_unknown_type_suggests_and_lists(typed: str, meant: str) -> None:
    """A wrong name gets the nearest one, and the list."""
    with pytest.raises(UsageError, match="unknown board type") as raised:
        board_types.require_board_type(typed)
    assert f"Did you mean {meant}?" in raised.value.hint
    assert "raspberry-pi-4" in raised.value.hint


def test_a_folder_adds_types(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named in the environment adds types. A folder that is not there is an error, not an empty one."""
    monkeypatch.setenv(board_types.EXTRA_FOLDER_VARIABLE, str(write(tmp_path, GOOD)))
    assert board_types.require_board_type("my-board").title == "Mine"
    monkeypatch.setenv(board_types.EXTRA_FOLDER_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="not a folder"):
        board_types.load_board_types()


def test_own_name_cannot_be_taken(tmp_path: pathlib.Path) -> None:
    """A user's file cannot change what one of the farm's own types means."""
    write(tmp_path, GOOD.replace("my-board", "jetson-nano"), "jetson-nano")
    with pytest.raises(UsageError, match="jetson-nano"):
        board_types.load_board_types(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mcpu:", "mcpuu:"), r"unknown key target\.mcpuu; did you mean mcpu\?"),
        (("num-cores: 2", "num_core: 2"), r"unknown key target\.num_core; did you mean num-cores\?"),
        (("title: Mine", "titel: Mine"), r"the key title is missing"),
        (("cpus: [0, 1]", "cpu: [0, 1]"), r"unknown key clusters\.0\.cpu; did you mean cpus\?"),
        (("title: Mine", "title: Mine\ncolour: blue"), r"unknown key colour; known: name, title, target"),
        (("num-cores: 2", "num-cores: two"), r"target\.num-cores: .*whole number.*'two'"),
        (("num-cores: 2", "num-cores: 0"), r"target\.num-cores: .*at least 1"),
        (("num-cores: 2", "num-cores: 3"), r"num-cores is 3, but clusters have 2 usable CPUs"),
        (("cpus: [0, 1]", "cpus: [0, 0]"), r"a CPU is in two clusters"),
        (("cpus: [0, 1]", "cpus: []"), r"clusters\.0\.cpus: "),
        (("kind: llvm", "kind: cuda"), r"target\.kind: .*'llvm'"),
        (("link_triple: aarch64-linux-gnu.2.31", "link_triple: host"), r"both be `host`"),
        (("link_triple: aarch64-linux-gnu.2.31", "link_triple:"), r"link_triple: must be set"),
        (("link_triple: aarch64-linux-gnu.2.31", "link_triple: arm board"), r"link_triple: .*match"),
        (("name: my-board", "name: other"), r"must be the file's, 'my-board'"),
        (("name: my-board", "name: My Board"), r"name: .*match"),
        (("title: Mine", "title: Mine\nmemory_bytes: 02201"), r"line 3 .*02201 is a number of base 8 in YAML \(1153\)"),
        (("title: Mine", "title: Mine\nmemory_bytes: -0_7"), r"-0_7 is a number of base 8 in YAML \(-7\)"),
        (("title: Mine", "title: Mine\nmemory_bytes: 22:01"), r"22:01 is a number of base 60 in YAML \(1321\)"),
        (("title: Mine", "title: 1:30.5"), r"1:30\.5 is a number of base 60 in YAML \(90\.5\)"),
        (("title: Mine", "title: Mine\n010: 1"), r"line 3 .*010 is a number of base 8"),
        (("title: Mine", "title: !!int x"), r"is not good YAML"),
        (("title: Mine", "title: Mine\ntitle: Yours"), r"line 3 is not good YAML: the key 'title' is given twice"),
        (("title: Mine", "title: [Mine"), r"is not good YAML"),
        (("title: Mine", "title: !!python/object:os.system x"), r"is not good YAML"),
        (("title: Mine", "? [a, {b: c}]\n: Mine"), r"is not good YAML"),
    ],
)
def test_wrong_file(tmp_path: pathlib.Path, change: tuple[str, str], message: str) -> None:
    """Each mistake is named with file and key, and where there is a near name it is suggested."""
    assert change[0] in GOOD
    write(tmp_path, GOOD.replace(*change))
    with pytest.raises(UsageError, match=message) as raised:
        board_types.load_board_types(tmp_path)
    assert "my-board.yaml" in raised.value.message


@pytest.mark.parametrize("text", ["", "just words", "- a\n- list\n"])
def test_file_without_keys(tmp_path: pathlib.Path, text: str) -> None:
    """A file that holds no keys is refused before its keys are looked for."""
    with pytest.raises(UsageError, match="must hold keys and values"):
        board_types.load_board_types(write(tmp_path, text))


def test_file_that_is_not_text(tmp_path: pathlib.Path) -> None:
    """Bytes that are not UTF-8 are named as such."""
    (tmp_path / "my-board.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        board_types.load_board_types(tmp_path)


def test_all_mistakes_at_once(tmp_path: pathlib.Path) -> None:
    """Two mistakes in one file give two lines, so that both can be mended in one go."""
    write(tmp_path, GOOD.replace("mcpu:", "mcpuu:").replace("title: Mine\n", ""))
    with pytest.raises(UsageError) as raised:
        board_types.load_board_types(tmp_path)
    lines = raised.value.message.splitlines()
    assert any("title is missing" in line for line in lines)
    assert any("target.mcpuu" in line for line in lines)


def test_data_is_packaged() -> None:
    """The folder that a wheel carries is the one that a checkout reads."""
    root = pathlib.Path(__file__).parents[2]
    assert documents.require_inventory_folder() == root / "inventory"
    assert re.search(r'(?m)^inventory = "farm/inventory/data"$', (root / "pyproject.toml").read_text())
