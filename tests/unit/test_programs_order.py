"""The order of a program: its arguments, files, settings and limits, and what no board could run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import struct

import pytest

from farm.errors import UsageError
from farm.programs import order as program_order
from farm.programs.order import ProgramOrder

METRICS = ("decode=[0].ts, more, tok/s", "ttft=[0].first, less, ms", "size=[0].bytes, less, MiB")


def write_elf(path: pathlib.Path, machine: int) -> str:
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, machine) + bytes(44))
    return str(path)


def test_a_command_is_an_argument_list(tmp_path: pathlib.Path) -> None:
    """Words are split as a shell would, and nothing else of a shell happens; files go along by digest."""
    (tmp_path / "app").write_bytes(b"abc")
    (tmp_path / "empty").touch()
    order = ProgramOrder("app --text 'a b' $HOME *", (str(tmp_path / "app"), str(tmp_path / "empty")), begin="go")
    command = order.to_command({})
    assert command.arguments == ("./app", "--text", "a b", "$HOME", "*")
    assert command.files == {"app": hashlib.sha256(b"abc").hexdigest(), "empty": hashlib.sha256().hexdigest()}
    assert (command.begin, command.end) == ("go", "")
    assert {name: content.tobytes() for name, content in order.contents.items()} == {"app": b"abc", "empty": b""}
    assert ProgramOrder("echo  $HOME | wc", in_shell=True).to_command({}).arguments == (
        "/bin/sh",
        "-c",
        "echo  $HOME | wc",
    )


def test_settings_make_series() -> None:
    """Series are the product of settings; values stay one argument each, and doubled braces are text."""
    order = ProgramOrder("/bin/app -t {threads} -m {quant}.gguf {{quant}}", vary=("threads=1,2", "quant=q4, a b"))
    assert list(order.list_settings()) == [
        *("threads=1 quant=q4", "threads=1 quant=a b", "threads=2 quant=q4", "threads=2 quant=a b"),
    ]
    last = order.to_command({"threads": "2", "quant": "a b"})
    assert last.arguments == ("/bin/app", "-t", "2", "-m", "a b.gguf", "{quant}")
    assert ProgramOrder("/bin/app").list_settings() == {"program": {}}


def test_an_order_survives_the_store(tmp_path: pathlib.Path) -> None:
    """What is stored makes the same order, also where its files are gone; its digest follows command and contents."""
    file = tmp_path / "data"
    file.write_bytes(b"1")
    order = ProgramOrder("/bin/cat data", (str(file),), metrics=METRICS, at_most=("ttft=1 s",))
    before = order.sha256
    again = ProgramOrder.from_dict(json.loads(json.dumps(dataclasses.asdict(order))))
    assert again == order
    file.write_bytes(b"2")
    assert again.sha256 != before
    file.unlink()
    assert ProgramOrder.from_dict(dataclasses.asdict(order)).read_limits() == order.read_limits()


def test_a_limit_on_the_objective_is_the_deadline() -> None:
    """The objective's limit is in s, for a rate its reciprocal; others stay limits."""
    order = ProgramOrder(
        "/bin/app", metrics=METRICS, at_least=("decode=10 tok/s", "decode=8"), at_most=("ttft=1.5 s", "size=9")
    )
    limits, deadline_s = order.read_limits()
    assert deadline_s == pytest.approx(0.1)
    assert [str(limit) for limit in limits] == ["ttft of at most 1500 ms", "size of at most 9 MiB"]
    assert ProgramOrder("/bin/app", at_most=("time=300 ms",)).read_limits() == ([], pytest.approx(0.3))


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"command": ""}, "names no program"),
        ({"command": "app 'a"}, "No closing quotation"),
        ({"command": "./app"}, "./app would not be there"),
        ({"command": "/bin/app {n}"}, "has {n}, which no --vary gives"),
        ({"command": "/bin/app", "vary": ("n=1",)}, "does not use {n}"),
        ({"command": "/bin/app {n}", "vary": ("n=1,",)}, "is not NAME=VALUE"),
        ({"command": "/bin/app {n}", "vary": ("n=1", "n=2")}, "each name once"),
        ({"command": "/bin/app {n}", "vary": ("n=" + ",".join(map(str, range(65))),)}, "65 series"),
        ({"command": "/bin/app", "metrics": ("a=x, less, s", "a=y, less, s")}, "two metrics alike"),
        ({"command": "/bin/app", "metrics": ("a=x, less, MiB",)}, "neither a time nor a rate"),
        ({"command": "/bin/app", "metrics": METRICS, "at_most": ("decode=9",)}, "more of the objective is better"),
    ],
)
def test_what_no_board_can_run_is_refused(order: dict[str, str], why: str) -> None:
    """One error of usage, before anything is stored or a board taken."""
    with pytest.raises(UsageError, match=why.replace("{", "\\{")):
        ProgramOrder(**order)  # type: ignore[arg-type]


def test_a_command_of_the_protocol_is_checked() -> None:
    """A begin that is no regular expression is an error of usage."""
    with pytest.raises(UsageError, match="no regular expression"):
        ProgramOrder("/bin/app", begin="(").to_command({})


def test_files_are_there_small_and_for_the_board(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for another processor is told before a board is taken, as is one that is missing or too large."""
    arm, x86 = write_elf(tmp_path / "arm", 183), write_elf(tmp_path / "x86", 62)
    data, cubin, old = tmp_path / "model.gguf", write_elf(tmp_path / "cubin", 190), write_elf(tmp_path / "old", 40)
    data.write_bytes(b"GGUF")
    ProgramOrder("arm", (arm, str(data), cubin, old)).require_architecture({"aarch64"})
    ProgramOrder("x86", (arm, x86)).require_architecture({"aarch64", "x86_64"})
    with pytest.raises(UsageError, match="x86 is for x86_64, and the board is aarch64"):
        ProgramOrder("x86", (x86,)).require_architecture({"aarch64"})
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="no such file"):
            ProgramOrder("/bin/app", (str(missing),)).require_architecture({"aarch64"})
    with pytest.raises(UsageError, match="two files have this name"):
        ProgramOrder("/bin/app", (x86, x86)).require_architecture({"x86_64"})
    monkeypatch.setattr(program_order, "_MOST_BYTES", 3)
    with pytest.raises(UsageError, match="has 4 bytes"):
        ProgramOrder("/bin/app", (str(data),)).require_architecture({"aarch64"})
