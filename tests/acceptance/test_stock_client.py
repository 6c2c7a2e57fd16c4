"""A stock TVM script, which knows nothing of the farm, borrows a board; a farm command waits for it, then goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.acceptance.rack import NAME, Rack, running_rack
from tests.integration import candidates

# What TVM's tutorials do, with the tracker's variables that users know. Stays on the board until its stdin closes.
_SCRIPT = """
import json, os, sys
import numpy as np
import tvm
from tvm import rpc

tracker = rpc.connect_tracker(os.environ["TVM_TRACKER_HOST"], int(os.environ["TVM_TRACKER_PORT"]))
remote = tracker.request(os.environ["TVM_TRACKER_KEY"], session_timeout=120)
remote.upload(sys.argv[1])
function = remote.load_module(os.path.basename(sys.argv[1]))
size = int(sys.argv[2])
device = remote.cpu()
a, b = (np.random.rand(size, size).astype("float32") for _ in range(2))
arrays = [tvm.runtime.tensor(value, device) for value in (a, b, np.zeros((size, size), "float32"))]
result = function.time_evaluator("main", device, number=3, repeat=3)(*arrays)
np.testing.assert_allclose(arrays[2].numpy(), a @ b, rtol=1e-3)
print(json.dumps(list(result.results)), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with running_rack(tmp_path_factory.mktemp("rack")) as rack:
        yield rack


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("library")
    path = folder / "matmul.so"
    path.write_bytes(candidates.build_matmul(folder))
    return path


@contextlib.contextmanager
def stock_script(rack: Rack, library: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    tracker = rack.home.run("status", "--json").json()["tracker"]
    environment = os.environ | {
        "TVM_TRACKER_HOST": tracker["host"],
        "TVM_TRACKER_PORT": str(tracker["port"]),
        "TVM_TRACKER_KEY": rack.host.key,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(library), str(candidates.SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_the_tracker_answers_tvms_own_query(rack: Rack) -> None:
    """`python -m tvm.exec.query_rpc_tracker` lists the board."""
    tracker = rack.home.run("status", "--json").json()["tracker"]
    command = [sys.executable, "-m", "tvm.exec.query_rpc_tracker", "--host", tracker["host"]]
    done = subprocess.run(
        [*command, "--port", str(tracker["port"])], capture_output=True, text=True, timeout=60, check=True
    )
    assert rack.host.key in done.stdout


def test_a_reserved_board_is_its_holders_by_every_way(rack: Rack, library: pathlib.Path) -> None:
    """While a person has it, a stock script and commands over SSH run there; the reservation goes on."""
    reserved = rack.home.run("board", "hold", NAME, "--for", "1h", "--why", "a look", "--json")
    assert reserved.code == 0, reserved.err
    with stock_script(rack, library) as script:
        assert len(json.loads(script.stdout.readline())) == 3
        ran = rack.home.run("board", "exec", NAME, "--", "cat", "/proc/version")
        assert (ran.code, "Linux" in ran.out) == (0, True), ran.err
    assert rack.home.rows("SELECT purpose FROM leases") == [("reserved: a look",)]
    assert rack.home.run("board", "release", NAME).code == 0
    assert rack.home.rows("SELECT purpose FROM leases") == []
