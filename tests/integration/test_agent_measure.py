"""What `device_agent.measure` says of good candidates and of those that misbehave, on one session."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from typing import Any

import numpy as np
import psutil
import pytest
import tvm.runtime

from device_agent import protocol
from device_agent.protocol import Limits, Status, TensorSpec
from device_agent.worker import arguments
from device_agent.worker.timing import Place
from tests.integration import candidates
from tests.integration.conftest import Agent, Board

# Enough for every good candidate here, little enough that a hungry one fails fast.
_LIMITS = Limits(timeout_s=10.0, memory_bytes=256 << 20)


@pytest.mark.core
def test_a_good_candidate_is_timed(board: Board, matmul: bytes) -> None:
    """An ok outcome has one positive latency per sample, and says where and when it was taken."""
    outcome = board.measure(matmul, repeat=4, number=2)
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 4
    assert all(0 < latency < 0.1 for latency in outcome.latency_s)
    assert outcome.calls_per_sample == 2
    assert outcome.timing_s >= sum(outcome.latency_s) * 2
    assert outcome.board
    assert outcome.agent_version
    assert outcome.started_at > 1.7e9
    assert outcome.before.load_1min is not None
    assert outcome.power is None  # nothing on this machine may be read without root


def test_number_grows_until_a_sample_is_long_enough(board: Board, matmul: bytes) -> None:
    """With min_repeat_s a sample takes about that long, for any requested number."""
    outcome = board.measure(matmul, repeat=3, number=1, min_repeat_s=0.02)
    lengths = sorted(latency * outcome.calls_per_sample for latency in outcome.latency_s)
    assert lengths[1] >= 0.02


def test_calls_take_turns_among_copies_of_large_weights() -> None:
    """Every set has weights of its own with the same values, more of them than caches hold; all else is shared."""
    shapes = ((1, 512), (512, 512), (512,), (1, 512))
    specs = tuple(TensorSpec(shape, "float32") for shape in shapes)
    tensors = arguments.allocate(specs, 0)
    sets = [tensors, *arguments.copy_weights(specs, tensors)]
    assert len({each[1].data_ptr() for each in sets}) == len(sets) == 17
    assert all((each[1].numpy() == tensors[1].numpy()).all() for each in sets)
    assert all(len({each[index].data_ptr() for each in sets}) == 1 for index in (0, 2, 3))
    assert arguments.copy_weights(specs[2:], tensors[2:]) == []


def test_copies_of_weights_are_made_once_for_all_workers_of_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared is what workers get, up to a bound on what a session keeps; beyond it they make their own."""
    specs = tuple(TensorSpec(shape, "float32") for shape in ((1, 512), (512, 512), (1, 512)))
    arguments.prepare(specs, 0, in_turns=True)
    first, again = (arguments.allocate_turns(specs, 0) for _ in range(2))
    assert [[each.data_ptr() for each in tensors] for tensors in first] == [
        [each.data_ptr() for each in tensors] for tensors in again
    ]
    assert len(first) == 17
    assert [each.data_ptr() for each in arguments.allocate(specs, 0)] == [each.data_ptr() for each in first[0]]
    monkeypatch.setattr(arguments, "_MOST_INHERITED_BYTES", 4 << 20)
    arguments.prepare(specs, 1, in_turns=True)
    first, again = (arguments.allocate_turns(specs, 1) for _ in range(2))
    assert first[0][1].data_ptr() == again[0][1].data_ptr()
    assert not {tensors[1].data_ptr() for tensors in first[1:]} & {tensors[1].data_ptr() for tensors in again[1:]}


def test_cold_weights_are_timed_like_all_others(board: Board, tmp_path: pathlib.Path) -> None:
    """Where the arguments are large, too, samples are as long as was asked for, with what is done between calls."""
    large = candidates.build_matmul(tmp_path, size=256)
    matrices = (TensorSpec((256, 256), "float32"),) * 3
    outcome = board.measure(large, arguments=matrices, cold_weights=True, repeat=3, min_repeat_s=0.05)
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 3
    assert outcome.timing_s >= 0.05 * 3
    assert 0 < statistics.median(outcome.latency_s) * outcome.calls_per_sample <= outcome.timing_s / 3


def test_calls_find_their_data_where_a_model_would_have_them() -> None:
    """Before each call the input is written anew, and results take turns, as in a model's memory."""
    tensors = arguments.allocate(tuple(TensorSpec((512, 512), "float32") for _ in range(2)), 0)
    wanted, results = tensors[0].numpy().copy(), set[int]()

    def overwrite(source: Any, result: Any) -> None:
        assert (source.numpy() == wanted).all()
        tvm.runtime.tensor(np.zeros_like(wanted)).copyto(source)
        results.add(result.data_ptr())

    place = Place(tensors)
    assert 0 < place.run(overwrite, itertools.repeat(tensors), 5) < 1
    assert len(results) == 4
    assert place.beside_s > 0


@pytest.mark.core
@pytest.mark.parametrize(
    ("entry", "status", "signal"),
    [
        ("segfault", Status.CRASHED, "SIGSEGV"),
        ("overflow", Status.CRASHED, "SIGSEGV"),
        ("aborts", Status.CRASHED, "SIGABRT"),
        ("exits_0", Status.CRASHED, None),
        ("exits_3", Status.CRASHED, None),
        ("loops", Status.RUN_TIMEOUT, None),
        ("eats_memory", Status.OUT_OF_MEMORY, "SIGSEGV"),
        ("reserves_memory", Status.OUT_OF_MEMORY, "SIGSEGV"),
        ("aborts_without_memory", Status.OUT_OF_MEMORY, "SIGABRT"),
        ("closes_everything", Status.CRASHED, None),
        ("absent", Status.LOAD_FAILED, None),
    ],
)
def test_a_bad_candidate_is_an_outcome(
    board: Board, bad: bytes, matmul: bytes, entry: str, status: Status, signal: str | None
) -> None:
    """However a candidate ends, its outcome says how, and the next measurement works on the same session."""
    limits = Limits(timeout_s=1.0 if entry == "loops" else 10.0, memory_bytes=256 << 20)
    outcome = board.measure(bad, entry=entry, arguments=(), limits=limits)
    assert (outcome.status, outcome.signal) == (status, signal), outcome.message
    assert outcome.latency_s == ()
    assert board.measure(matmul, limits=_LIMITS).status is Status.OK


@pytest.mark.parametrize(
    ("entry", "said"),
    [("exits_3", "exit code 3"), ("exits_0", "exit code 0"), ("aborts", "about to abort"), ("absent", "'absent'")],
)
def test_the_message_says_what_happened(board: Board, bad: bytes, entry: str, said: str) -> None:
    """The message carries the exit code, the missing name, or the last words on stderr."""
    assert said in board.measure(bad, entry=entry, arguments=(), limits=_LIMITS).message


@pytest.mark.parametrize("library", [b"", b"this is no library", b"\x7fELF" + b"\0" * 100])
def test_what_is_no_library_fails_to_load(board: Board, matmul: bytes, library: bytes) -> None:
    """Bytes that the loader refuses are load_failed with the loader's words."""
    outcome = board.measure(library)
    assert outcome.status is Status.LOAD_FAILED
    assert outcome.message
    assert board.measure(matmul).status is Status.OK


def test_loading_has_a_deadline_of_its_own(
    board: Board, bad: bytes, matmul: bytes, library_folder: pathlib.Path
) -> None:
    """A program that never loads differs from one that never ends, and time spent loading is not taken from running."""
    limits = Limits(timeout_s=0.4, load_timeout_s=0.8, memory_bytes=256 << 20)
    hangs = board.measure(candidates.build_hang_when_loaded(library_folder), entry="nothing", limits=limits)
    assert (hangs.status, hangs.message) == (Status.LOAD_FAILED, "not loaded within 0.8 s")
    loops = board.measure(bad, entry="loops", arguments=(), limits=limits)
    assert (loops.status, loops.message) == (Status.RUN_TIMEOUT, "not finished after 0.4 s")
    limits = Limits(timeout_s=20.0, load_timeout_s=0.8, memory_bytes=256 << 20, threads=1)
    slow = board.measure(matmul, repeat=6, number=1, min_repeat_s=0.15, limits=limits)
    assert slow.status is Status.OK, slow.message
    assert slow.timing_s > 0.8


def test_output_of_a_candidate_corrupts_nothing(board: Board, bad: bytes) -> None:
    """A candidate that writes megabytes to stdout and stderr is measured all the same."""
    outcome = board.measure(bad, entry="talks", arguments=(), repeat=1)
    assert outcome.status is Status.OK, outcome.message


def test_arguments_that_cannot_be_are_told_apart(board: Board, matmul: bytes) -> None:
    """A kernel that refuses its arguments has crashed without a signal, and the message quotes it. Arguments that do
    not fit the worker's memory limit end as out_of_memory. A dtype that the agent cannot fill is a farm_error
    naming it.
    """
    outcome = board.measure(matmul, arguments=(TensorSpec((2, 2), "float32"),) * 3)
    assert outcome.status is Status.CRASHED
    assert outcome.signal is None
    assert "raised" in outcome.message
    outcome = board.measure(matmul, arguments=(TensorSpec((1 << 30,), "float32"),), limits=_LIMITS)
    assert outcome.status is Status.OUT_OF_MEMORY
    outcome = board.measure(matmul, arguments=(TensorSpec((2,), "complex7"),))
    assert outcome.status is Status.FARM_ERROR
    assert "complex7" in outcome.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_arguments_of_every_usual_dtype_can_be_filled(board: Board, bad: bytes, dtype: str) -> None:
    """Tensors of all dtypes that models use are allocated on the board."""
    outcome = board.measure(bad, entry="nothing", arguments=(TensorSpec((3, 5), dtype), TensorSpec((), dtype)))
    assert outcome.status is Status.OK, outcome.message


@pytest.mark.core
def test_children_of_a_candidate_die_with_it(board: Board, bad: bytes, agent: Agent) -> None:
    """A process that a candidate left behind, in a group of its own, is gone when the outcome comes."""
    outcome = board.measure(bad, entry="leaves_a_child", arguments=(), warmup=0, repeat=1)
    assert outcome.status is Status.OK, outcome.message
    (file,) = agent.session_files("orphan")
    assert not psutil.pid_exists(int(file.read_text()))


def test_a_session_that_has_threads_refuses_to_measure(board: Board, matmul: bytes, tmp_path: pathlib.Path) -> None:
    """After a parallel kernel ran straight in the session, a worker forked from it would hang; this is said instead."""
    import numpy as np
    import tvm

    path = tmp_path / "direct.so"
    path.write_bytes(matmul)
    board.rpc.upload(str(path))
    module = board.rpc.load_module("direct.so")
    arrays = [tvm.runtime.tensor(np.ones((64, 64), "float32"), board.rpc.cpu(0)) for _ in range(3)]
    module["main"](*arrays)
    outcome = board.measure(matmul)
    assert outcome.status is Status.FARM_ERROR
    assert "threads" in outcome.message


def test_a_spec_that_is_none_is_refused(board: Board, matmul: bytes) -> None:
    """A message with an unknown key raises at the caller, naming the key, and the session goes on. Limits on threads
    are accepted from one to more than there are cores.
    """
    with pytest.raises(Exception, match="colour"):
        board.rpc.get_function(protocol.MEASURE)('{"arguments": [], "colour": 1}', matmul)
    assert board.measure(matmul).status is Status.OK
    for threads in (1, 2, 4):
        outcome = board.measure(matmul, limits=Limits(threads=threads))
        assert outcome.status is Status.OK, outcome.message


def test_describe_tells_what_the_board_is(board: Board, agent: Agent) -> None:
    """The description names the board as the tracker knows it, its cores, memory and engines."""
    description = board.describe()
    assert f"{description.board_type}/{description.name}" == agent.key
    assert description.protocol_version == protocol.PROTOCOL_VERSION
    assert description.cores_online
    assert description.memory_bytes > 1 << 28
    assert {"relax_vm", "kernel"} <= set(description.engines)
    assert not description.simulated
