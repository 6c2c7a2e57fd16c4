"""The agent's parts on their own: argument values, linking, processes, command line."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import tarfile
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent import agent, processes
from device_agent.protocol import ProtocolError
from device_agent.session import session
from device_agent.worker import arguments, engines
from farm.measure.arrays import make_inputs, pack_arrays, unpack_arrays


@given(st.integers(0, 300_000), st.integers(0, 1 << 20))
def test_arguments_repeat_the_pool_from_their_own_start(size: int, start: int) -> None:
    """Filling writes every element, and element i is element (start + i) of the endless pool."""
    pool = arguments.pool("float32", 0)
    filled = np.full(size, np.nan, "float32")
    arguments.fill(filled, pool, start)
    np.testing.assert_array_equal(filled, pool[(start + np.arange(size)) % len(pool)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"])
def test_values_are_small_and_never_constant(dtype: str) -> None:
    """Floats lie in [-1, 1] and integers in 0..7, and there are at least two different ones."""
    pool = arguments.pool(dtype, 5)
    wide = pool.astype("float64")
    low, high = (-1, 1) if "float" in dtype else (0, 7)
    assert low <= wide.min() < wide.max() <= high


def test_values_are_seeded_and_of_known_dtypes() -> None:
    """The same seed gives the same values, another seed others; the first ones are known, on every machine. An unknown
    dtype raises with its name.
    """
    np.testing.assert_array_equal(arguments.values.__wrapped__(1), arguments.values(1))
    assert not np.array_equal(arguments.values(1), arguments.values(2))
    assert arguments.values(0)[:4].tolist() == [22979, 8976, 730, -15087]
    with pytest.raises(arguments.UnknownDtypeError, match="float3"):
        arguments.pool("float3", 0)


def test_inputs_keep_their_order() -> None:
    """Arrays come out of an npz in the order in which they went in, with any names."""
    import io

    buffer = io.BytesIO()
    np.savez(buffer, z=np.zeros(2), a=np.ones((2, 2)).T)
    assert list(engines.read_arrays(buffer.getvalue())) == ["z", "a"]
    assert engines.read_arrays(b"") == {}
    with pytest.raises(ProtocolError, match="npz"):
        engines.read_arrays(b"PK rubbish")


def test_arrays_arrive_as_they_are() -> None:
    """A function that takes a number without dimensions refuses a vector of one. NumPy's files have no name for it;
    values that a program is checked with are of every type that it takes.
    """
    scalar = np.array(3, "int64")
    turned = np.ones((2, 3)).T
    arrays = engines.read_arrays(pack_arrays({"index": scalar, "turned": turned}))
    assert arrays["index"].shape == ()
    assert arrays["turned"].flags.c_contiguous
    inputs = make_inputs([((2, 3), "bfloat16"), ((2,), "int64"), ((2,), "float32")], seed=0)
    arrays = engines.read_arrays(pack_arrays(inputs))
    assert [str(array.dtype) for array in arrays.values()] == ["bfloat16", "int64", "float32"]
    np.testing.assert_array_equal(arrays["arg_000"], inputs["arg_000"])
    back = unpack_arrays(pack_arrays(arrays))
    assert back["arg_000"].dtype == arrays["arg_000"].dtype


def test_what_is_linked_on_a_board(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .so needs no linker. Linking without g++, gcc and ziglang raises with what to do."""
    assert session.link(tmp_path / "x.so") == tmp_path / "x.so"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(session.NoLinkerError, match="ziglang"):
        session.link(tmp_path / "x.o")


def test_the_linkers_words_are_kept(tmp_path: pathlib.Path) -> None:
    """Objects that are none make linking fail with what the linker said; names in the tar lead nowhere else."""
    rubbish = tmp_path / "rubbish.o"
    rubbish.write_text("rubbish")
    archive = tmp_path / "x.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(rubbish, arcname="../../escaped.o")
    with pytest.raises(RuntimeError, match="escaped"):
        session.link(archive)
    assert not (tmp_path.parent / "escaped.o").exists()


def test_a_forked_body_never_returns_into_its_parent() -> None:
    """A body that raises ends its process with exit code 1; one that returns, with 0."""

    def fails() -> None:
        os.close(2)
        raise RuntimeError

    for body, code in ((fails, 1), (lambda: None, 0)):
        status = processes.reap(processes.fork(body), time.monotonic() + 10)
        assert status is not None
        assert os.waitstatus_to_exitcode(status) == code


def test_processes_are_killed_reaped_and_told_of() -> None:
    """After kill_children no child is left, also one in a process group of its own. Waiting for a process that lives on
    gives up in time, and the process can still be reaped. Signals are named, also those that Python does not know.
    """

    def kill_all() -> None:  # in a process of its own: this one's children are those of fixtures, too
        children = [processes.fork(signal.pause) for _ in range(3)]
        assert set(children) <= set(processes.find_children())
        assert processes.kill_children()
        assert processes.find_children() == []

    assert processes.reap(processes.fork(kill_all), time.monotonic() + 30) == 0
    pid = processes.fork(signal.pause)
    assert processes.reap(pid, time.monotonic() + 0.01) is None
    assert not processes.has_ended(pid)
    processes.kill_group(pid)
    assert processes.reap(pid, time.monotonic() + 10) == signal.SIGKILL
    assert processes.describe_end(signal.SIGSEGV) == "killed by SIGSEGV"
    assert processes.describe_end(3 << 8) == "exit code 3"
    assert processes.signal_name(63) == "signal 63"


@pytest.mark.parametrize(
    ("arguments_", "said"),
    [
        (["serve", "--tracker", "nonsense"], "HOST:PORT"),
        (["serve", "--tracker", "host:99999"], "not a port"),
        (["serve", "--name", "a board"], "not a name"),
        (["serve", "--board-type", "a:b"], "not a name"),
        (["serve", "--port", "0"], "not a port"),
        (["serve", "--port", "9100", "--port-end", "9090"], "below"),
        (["serve", "--max-library-bytes", "-1"], "positive"),
        (["fly"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_refused(arguments_: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options end with exit code 2 and a line that says what is wrong."""
    try:
        code = agent.main(arguments_)
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert said in capsys.readouterr().err


def test_describe_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    """`describe --json` prints the description and nothing else; without it, a table."""
    assert agent.main(["describe", "--json", "--name", "b1", "--board-type", "desk"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert (description["name"], description["board_type"]) == ("b1", "desk")
    assert agent.main(["describe"]) == 0
    assert "cores_online" in capsys.readouterr().out
