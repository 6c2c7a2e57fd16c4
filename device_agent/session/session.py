"""The process that serves one client: the stock RPC functions, the agent's own, and TVM's server loop.

Candidates of `device_agent.measure` run in workers (`worker.py`). Code that a stock client loads runs right here, and
its crash ends only this session.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import hmac
import importlib.util
import json
import os
import re
import select
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import tvm.rpc
import tvm.rpc._ffi_api as rpc_api
import tvm.runtime.module
from tvm.runtime import load_module as load
from tvm_ffi import register_global_func

from device_agent import processes, protocol
from device_agent.protocol.interpreters import python_command
from device_agent.session.board import Board
from device_agent.session.fencing import Claimant
from device_agent.session.measurement import Measurement
from device_agent.worker import arguments, limits, program, worker
from device_agent.worker.plan import LoadError

# Limits on cached programs; the least recently used goes first.
MOST, MOST_BYTES = 16, 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PIECE_BYTES = 1 << 20


# Linking a few objects takes 0.2 s; the first call of ziglang on a slow board builds its C library first.
_TIMEOUT_S = 120.0


class Programs:
    """Cached programs: files in `folder` named by their SHA-256, in the order of their last use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    def keep(self, digest: str, program: bytes) -> list[str]:
        """Store a program; return all stored digests. Raises ValueError for a wrong digest, OSError."""
        if not _DIGEST.fullmatch(digest) or not _is_of((program,), digest):
            raise ValueError(f"{digest[:64]!r} is not the SHA-256 of the program that came with it")
        self._folder.mkdir(exist_ok=True)
        self._forget(digest)
        while self._sizes and (len(self._sizes) >= MOST or sum(self._sizes.values()) + len(program) > MOST_BYTES):
            self._forget(next(iter(self._sizes)))
        try:
            (self._folder / digest).write_bytes(program)
        except OSError:
            (self._folder / digest).unlink(missing_ok=True)
            raise
        self._sizes[digest] = len(program)
        return list(self._sizes)

    def take(self, digest: str) -> bytes:
        """Load a stored program. Raises ValueError if it is missing, or was changed by a candidate."""
        with self._using(digest) as path:
            program = path.read_bytes()
            _require_same((program,), digest)
        return program

    def find(self, digest: str) -> Path:
        """Return the executable file of a stored program, checked in pieces: it may be large. Raises as `take`."""
        with self._using(digest) as path, path.open("rb") as file:
            _require_same(iter(functools.partial(file.read, _PIECE_BYTES), b""), digest)
            path.chmod(0o500)
        return path

    @contextlib.contextmanager
    def _using(self, digest: str) -> Iterator[Path]:
        """The file of a stored program, which is the latest used after the block, and forgotten where that raises."""
        size = self._sizes.pop(digest, None)
        if size is None:
            raise ValueError(f"no program {digest[:64]!r} is kept")
        yield self._folder / digest
        self._sizes[digest] = size

    def _forget(self, digest: str) -> None:
        if self._sizes.pop(digest, None) is not None:
            (self._folder / digest).unlink(missing_ok=True)


def _is_of(pieces: Iterable[bytes], digest: str) -> bool:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return hmac.compare_digest(found.hexdigest(), digest)


def _require_same(pieces: Iterable[bytes], digest: str) -> None:
    if not _is_of(pieces, digest):
        raise ValueError(f"the program {digest} was changed on the board")


class NoLinkerError(RuntimeError):
    """The board has no linker."""


def link(path: Path) -> Path:
    """Return a loadable library made from `path`: itself, unless it is a .o or .tar.

    Raises NoLinkerError without a linker, RuntimeError with the linker's output on failure.
    """
    if path.suffix == ".o":
        objects = [path]
    elif path.suffix == ".tar":
        objects = _unpack(path)
    else:
        return path
    output = path.with_name(path.name + ".so")
    command = [*find_linker(), "-shared", "-fPIC", "-o", str(output), *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return output


def _unpack(archive_path: Path) -> list[Path]:
    """Write a tar's files side by side under generated names, so that no member name can escape."""
    folder = archive_path.with_suffix(".objects")
    folder.mkdir(exist_ok=True)
    objects: list[Path] = []
    with tarfile.open(archive_path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                objects.append(folder / f"{len(objects)}-{Path(member.name).name}")
                objects[-1].write_bytes(content.read())
    return objects


def find_linker() -> list[str]:
    """The command that links on this board. Raises NoLinkerError."""
    for name in ("g++", "gcc"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return python_command("-m", "ziglang", "cc")
    raise NoLinkerError(
        "this board has no g++, gcc or ziglang to link uploaded objects with; upload a linked .so, or install ziglang"
    )


def load_tvm(board: Board) -> None:
    """Import TVM's runtime without its compiler before the first fork, so that forks share it."""
    # Stock clients call tvm.contrib.random.*, from a library that the runtime-only mode leaves out.
    package = importlib.util.find_spec("tvm")
    extra = Path(package.origin or "").parent / "lib" / "libtvm_runtime_extra.so" if package else None
    if extra is not None and extra.exists():
        ctypes.CDLL(str(extra), ctypes.RTLD_GLOBAL)
    _rehearse(board)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page it visits
    gc.enable()


def _rehearse(board: Board) -> None:
    """Run once the part of a worker's job that needs no library.

    First-use initialisation of Python, NumPy and TVM is then shared by all forks: NumPy's statistics alone take 8 ms.
    """
    spec = protocol.MeasureSpec(arguments=(protocol.TensorSpec((8, 8), "float32"),) * 2)
    spec = protocol.MeasureSpec.from_json(spec.to_json())
    arguments.allocate(spec.arguments, spec.seed)
    samples = tuple(tvm.runtime.module.BenchmarkResult([1.0, 2.0]).results)
    outcome = protocol.Outcome(protocol.Status.OK, latency_s=samples, before=board.evidence.read())
    text, _ = protocol.unpack_frame(protocol.pack_frame(outcome.to_json(), b""))
    board.sign(protocol.Outcome.from_json(text))


def serve(board: Board, sock: socket.socket, folder: Path, claimant: Claimant) -> None:
    """Serve the client of `sock` until it leaves. Runs in a process of its own, in `folder`.

    Once the lease claimed through `claimant` is over, functions that change or use the board are refused.
    """
    processes.become_subreaper()
    # Stock clients' code in this process gets every core; nothing else here computes.
    os.environ.setdefault("TVM_NUM_THREADS", str(limits.thread_count(protocol.Limits())))
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "1000")  # as in a deployed model (`runner.py`): 1 ms
    if board.access is not None:
        # The listener ends a session whose client has gone; if it is stopped itself, the clocks are released anyway.
        board.access.is_wanted = functools.partial(_is_connected, sock)
    with contextlib.suppress(OSError):  # a board that does not answer reports so at its first use
        board.time.begin()
    if board.simulation is not None:
        board.simulation.begin_session()
    _Functions(board, sock, folder, claimant).register()
    rpc_api.ServerLoop(sock.fileno())


def _is_connected(sock: socket.socket) -> bool:
    """Whether the client is still connected."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)


def return_exception(sock: socket.socket, message: str) -> None:
    """Send the client the reason why its session was ended."""
    rpc_api.ReturnException(sock.fileno(), f"RPCSessionTimeoutError: {message}")


class _Functions:
    """The functions of one session, which clients call by name."""

    def __init__(self, board: Board, sock: socket.socket, folder: Path, claimant: Claimant) -> None:
        self._board, self._sock, self._folder, self._claimant = board, sock, folder, claimant
        self._workers = worker.Workers(folder, board.shared)
        self._kept = Programs(folder / "programs")

    def register(self) -> None:
        """Register them with TVM."""
        functions = {
            "tvm.rpc.server.workpath": lambda name: str(self._path_of(name)),
            "tvm.rpc.server.upload": self._upload,
            "tvm.rpc.server.load_module": lambda name: load(str(link(self._path_of(name)))),
            "tvm.rpc.server.download_linked_module": lambda name: bytearray(link(self._path_of(name)).read_bytes()),
            protocol.CLAIM: lambda claim: self._claimant.claim(protocol.LeaseClaim.from_json(claim)).to_json(),
            protocol.DESCRIBE: lambda: self._board.describe().to_json(),
            protocol.MEASURE: self._measure,
            protocol.RUN_MODEL: self._run_model,
            protocol.KEEP_PROGRAM: self._keep_program,
            protocol.RUN_KEPT: lambda spec, digest, inputs: self._run_model(spec, self._kept.take(digest), inputs),
            protocol.PIN: self._pin,
            protocol.UNPIN: lambda: self._board.unpin().to_json(),
            protocol.POWER: self._watch_power,
        }
        for name, function in functions.items():
            register_global_func(name, function, override=True)

    def _path_of(self, name: str) -> Path:
        path = Path(os.path.normpath(self._folder / name))
        if not path.is_relative_to(self._folder):
            raise ValueError(f"{name!r} lies outside this session's work folder")
        return path

    def _checked(self, data: bytes, what: str) -> bytes:
        most = self._board.max_library_bytes
        if len(data) > most:
            raise ValueError(f"{what} of {len(data)} bytes refused: this agent takes {most} (--max-library-bytes)")
        return data

    def _keep_acknowledging(self) -> None:
        # A client's large argument arrives in many small writes; an SSH tunnel waits for an acknowledgement before it
        # forwards more, which would add 40 ms. The kernel resets this option, so set it at every call.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _upload(self, name: str, data: bytes) -> None:
        self._path_of(name).write_bytes(self._checked(data, "upload"))

    def _measure(self, spec_json: str, library: bytes) -> str:
        board, spec = self._board, protocol.MeasureSpec.from_json(spec_json)
        self._keep_acknowledging()
        if reason := self._claimant.find_refusal():
            return board.sign(protocol.Outcome(protocol.Status.FARM_ERROR, reason)).to_json()
        self._checked(library, "library")
        if spec.device == protocol.CPU:
            # Before the fork, so that only the first call pays for it.
            arguments.prepare(spec.arguments, spec.seed, in_turns=spec.cold_weights)
        run = Measurement(board, spec, (library,))
        with board.powered(spec.device):
            outcome = run.refusal or self._workers.measure(spec, library, run.plan, run.beside)
        return run.finish(outcome).to_json()

    def _run_model(self, spec_json: str, library: bytes, inputs: bytes) -> bytes:
        board, spec = self._board, protocol.RunSpec.from_json(spec_json)
        self._keep_acknowledging()
        if reason := self._claimant.find_refusal():
            refused = board.sign(protocol.Outcome(protocol.Status.FARM_ERROR, reason))
            return protocol.pack_frame(refused.to_json(), b"")
        self._checked(inputs, "inputs")
        self._checked(library, "program")
        if spec.command is not None:
            return self._run_command(spec, spec.command)
        run = Measurement(board, spec, (library, inputs))
        outcome, outputs = run.refusal, b""
        if outcome is None:
            with board.powered(spec.device):
                outcome, outputs = self._workers.run_model(spec, library, inputs, run.plan, run.beside)
        return protocol.pack_frame(run.finish(outcome).to_json(), outputs)

    def _run_command(self, spec: protocol.RunSpec, command: protocol.Command) -> bytes:
        board = self._board
        files = {name: self._kept.find(digest) for name, digest in command.files.items()}
        try:
            path = program.find_program(command, files)
            prefix = board.admit_program(path, spec.device, was_sent=path in files.values())
        except LoadError as error:
            refused = board.sign(protocol.Outcome(protocol.Status.LOAD_FAILED, str(error)))
            return protocol.pack_frame(refused.to_json(), b"")
        run = Measurement(board, spec, (b"", b""))
        outcome, outputs = run.refusal, b""
        if outcome is None:
            with board.powered(spec.device):
                outcome, outputs = self._workers.run_program(spec, prefix, files, run.plan, run.beside)
        return protocol.pack_frame(run.finish(outcome).to_json(), outputs)

    def _keep_program(self, digest: str, program: bytes) -> str:
        self._keep_acknowledging()
        return json.dumps(self._kept.keep(digest, self._checked(program, "program")))

    def _pin(self, point_json: str) -> str:
        point = protocol.OperatingPoint.from_json(point_json)
        if reason := self._claimant.find_refusal():
            return protocol.PinReport(protocol.PinStatus.FAILED, reason).to_json()
        return self._board.pin(point).to_json()

    def _watch_power(self, spec_json: str) -> str:
        spec = protocol.PowerSpec.from_json(spec_json)
        if reason := self._claimant.find_refusal():
            raise PermissionError(reason)
        return self._board.watch_power(spec).to_json()
