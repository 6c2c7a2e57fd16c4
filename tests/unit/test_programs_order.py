"""The order of a program: its arguments, files, settings and limits, and what no board could run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import pytest

from farm.errors import UsageError
from farm.programs import order as program_order
from farm.programs.order import ProgramOrder

METRICS = ("decode=[0].ts, more, tok/s", "ttft=[0].first, less, ms", "size=[0].bytes, less, MiB")


def write_elf(path: pathlib.Path, machine: int) -> str:
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + machine.to_bytes(2, "little"))
    return str(path)


def test_a_command_is_an_argument_list(tmp_path: pathlib.Path) -> None:
    """Words are split as a shell would, and nothing else of a shell happens; files go along by digest."""
    (tmp_path / "app").write_bytes(b"abc")
    (tmp_path / "empty").touch()
    order = ProgramOrder("app --text 'a b' $HOME *", (str(tmp_path / "app"), str(tmp_path / "empty")), begin="go")
    command = order.to_command({})
    assert command.arguments == ("./app", "--text", "a b", "$HOME", "*")
    assert command.files == {"app": hashlib.sha256(b"abc").hexdigest(), "empty": hashlib.sha256().hexdigest()}
    assert {name: content.tobytes() for name, content in order.contents.items()} == {"app": b"abc", "empty": b""}
    assert ProgramOrder("echo  $HOME | wc", in_shell=True).to_command({}).arguments[1:] == ("-c", "echo  $HOME | wc")
    with pytest.raises(UsageError, match="no regular expression"):
        ProgramOrder("/bin/app", begin="(").to_command({})


def test_settings_make_series() -> None:
    """Series are the product of settings; values stay one argument each, and doubled braces are text."""
    order = ProgramOrder("/bin/app -t {n} -m {quant}.gguf {{quant}}", vary=("n=1,2", "quant=q4, a b"))
    assert list(order.list_settings()) == ["n=1 quant=q4", "n=1 quant=a b", "n=2 quant=q4", "n=2 quant=a b"]
    last = order.to_command({"n": "2", "quant": "a b"})
    assert last.arguments == ("/bin/app", "-t", "2", "-m", "a b.gguf", "{quant}")
    assert ProgramOrder("/bin/app").list_settings() == {"program": {}}


def test_an_order_survives_the_store_and_its_files(tmp_path: pathlib.Path) -> None:
    """What is stored makes the same order, also where its files are gone; its digest follows their contents."""
    file = tmp_path / "data"
    file.write_bytes(b"1")
    order = ProgramOrder("/bin/cat data", (str(file),), metrics=METRICS, at_most=("ttft=1 s",))
    before = order.sha256
    file.write_bytes(b"2")
    again = ProgramOrder.from_dict(json.loads(json.dumps(dataclasses.asdict(order))))
    assert again.sha256 != before
    file.unlink()
    assert again == ProgramOrder.from_dict(dataclasses.asdict(order))


def test_a_limit_on_the_objective_is_the_deadline() -> None:
    """The objective's limit is in s, for a rate its reciprocal; others stay limits."""
    order = ProgramOrder("/bin/a", metrics=METRICS, at_least=("decode=10 tok/s", "decode=8"), at_most=("size=9",))
    limits, deadline_s = order.read_limits()
    assert ([str(limit) for limit in limits], deadline_s) == (["size of at most 9 MiB"], pytest.approx(0.1))
    assert ProgramOrder("/bin/app", at_most=("time=300 ms",)).read_limits() == ([], pytest.approx(0.3))


@pytest.mark.parametrize(
    ("command", "others", "why"),
    [
        ("", {}, "names no program"),
        ("app 'a", {}, "No closing quotation"),
        ("./app", {}, "./app would not be there"),
        ("/bin/app {n}", {}, "has \\{n}, which no --vary gives"),
        ("/bin/app", {"vary": ("n=1",)}, "does not use \\{n}"),
        *(("/bin/app {n}", {"vary": vary}, "each name once") for vary in (("n=1,",), ("n=1", "n=2"), ("n",))),
        ("/bin/app {n}", {"vary": ("n=" + ",".join(map(str, range(65))),)}, "65 series"),
        ("/bin/app", {"metrics": ("a=x, less, s", "a=y, less, s")}, "two metrics alike"),
        ("/bin/app", {"metrics": METRICS, "at_most": ("decode=9",)}, "more of the objective is better"),
    ],
)
def test_what_no_board_can_run_is_refused(command: str, others: dict[str, Any], why: str) -> None:
    """One error of usage, before anything is stored or a board taken."""
    with pytest.raises(UsageError, match=why):
        ProgramOrder(command, **others)


def test_files_are_there_small_and_for_the_board(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for another processor is refused before a board is taken, as is one that is missing or too large."""
    arm, x86 = write_elf(tmp_path / "arm", 183), write_elf(tmp_path / "x86", 62)
    ProgramOrder("arm", (arm, write_elf(tmp_path / "cubin", 190))).require_architecture({"aarch64"})
    ProgramOrder("x86", (arm, x86)).require_architecture({"aarch64", "x86_64"})
    monkeypatch.setattr(program_order, "_MOST_BYTES", 20)
    (large := tmp_path / "large").write_bytes(bytes(21))
    none = str(tmp_path / "none")
    for files, why in (
        *(((x86,), "x86 is for x86_64, and the board is aarch64"), ((arm, arm), "two files have this name")),
        *(((none,), "no such file"), ((str(tmp_path),), "no such file"), ((str(large),), "has 21 bytes")),
    ):
        with pytest.raises(UsageError, match=why):
            ProgramOrder("/bin/app", files).require_architecture({"aarch64"})
