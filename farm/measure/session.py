"""One board, held through TVM's RPC: open under a lease, call the agent's functions, cut what overruns, close.

The caller retries and chooses boards; a broken session is closed and a new one opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy.typing as npt

from device_agent import protocol
from device_agent.protocol import (
    ClaimReport,
    Description,
    LeaseClaim,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinReport,
    PowerSpec,
    PowerTrace,
    ProtocolError,
    RunSpec,
)
from device_agent.protocol.interpreters import skip_missing_types
from farm.closing import Closing
from farm.connectivity.relay import Relay
from farm.connectivity.tracker import Tracker
from farm.errors import (
    BoardHostileError,
    BoardLostError,
    BoardUnsafeError,
    DeadlineError,
    InvalidReplyError,
    PermanentError,
    UnavailableError,
)
from farm.measure import answers, asking
from farm.measure.arrays import Arrays, BufferName, HarmfulArraysError, pack_arrays, read, unpack_arrays
from farm.measure.asking import AgentAddress, ask_for_board, require_latest
from farm.values import Lease

# Below this, asking for a program by name costs as much as sending it.
LEAST_BYTES = 256 << 10
# More than any agent keeps.
_MOST = 1024

_log = logging.getLogger(__name__)


class UploadCache:
    """The upload cache of one session. `keep` has the board keep a program, by its digest; it returns what the board
    has then.
    """

    def __init__(self, keep: Callable[[str, bytes | BufferName], object]) -> None:
        self._keep = keep
        self._there: frozenset[str] = frozenset()
        self._can_keep = True
        self._latest: tuple[bytes, str] = (b"", "")

    def find(self, program: bytes | BufferName) -> str | None:
        """Return the digest of a program that the board has; None where it must be sent with the run.

        Raises what `keep` raises except PermanentError: an agent without room still runs it. Raises ProtocolError for
        an invalid answer.
        """
        if not self._can_keep or len(program) < LEAST_BYTES:
            return None
        if isinstance(program, BufferName):
            digest = program.sha256
        else:
            if program is not self._latest[0]:
                self._latest = program, hashlib.sha256(program).hexdigest()
            digest = self._latest[1]
        if digest not in self._there:
            try:
                self._there = _read(self._keep(digest, program))
            except PermanentError as error:
                _log.info("programs are sent with every run: %s", error)
                self._can_keep = False
                return None
        return digest if digest in self._there else None


def _read(answer: object) -> frozenset[str]:
    try:
        digests = json.loads(answers.read_text(answer))
    except ValueError as error:
        raise ProtocolError(f"programs are kept, but which is not said: {error}") from error
    if not isinstance(digests, list) or len(digests) > _MOST or not all(isinstance(each, str) for each in digests):
        raise ProtocolError("programs are kept, but which is not said")
    return frozenset(digests)


# For the tracker to offer the board.
REQUEST_TIMEOUT_S = 60.0
# For the agent to fork a session.
CONNECT_TIMEOUT_S = 15.0
# For a description; the first use of a GPU's driver takes up to 10 s of it.
DESCRIBE_TIMEOUT_S = 15.0
# For the session to claim its lease from the agent.
CLAIM_TIMEOUT_S = 15.0
# The board verifies or gives up within a few seconds; a power mode's own tool may take four.
PIN_TIMEOUT_S = 20.0
# What a call may take beyond the worker's own deadline: upload at about 20 MB/s, fork, start, answer. The board's
# deadline must fire first, because it gives an outcome where ours only gives up.
_CALL_GRACE_S = 10.0
_SLOWEST_BYTES_PER_S = 5e6
# The part of it for an upload beyond its bytes. Less than a megabyte fits into buffers on the route, so its arrival
# cannot be seen.
_UPLOAD_GRACE_S = 5.0
_SEEN_UPLOAD_BYTES = 1 << 20

Answer = TypeVar("Answer", bound=protocol.Message)


class BoardSession(Closing):
    """The exclusive use of one board until `close`. Not thread-safe; useless after any error but PermanentError."""

    def __init__(
        self,
        tracker: Tracker | AgentAddress,
        key: str,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        lease: Lease | None = None,
        *,
        doubted: bool = False,
    ) -> None:
        """Wait for the board and connect. Raises DeadlineError, BoardLostError, UnavailableError, BoardUnsafeError.

        With a lease, the agent first ends the sessions of earlier leases of the store, and later refuses this one once
        a newer lease has claimed the board. A client without a lease is waited for, up to BoardBusyError. Raises
        LeaseOverError where a later lease exists already.

        `doubted`: find out who is at fault if the board does not answer; see `asking`.
        """
        self.key = key
        self._simulated: bool | None = None
        self._claim = None if lease is None else asking.to_claim(lease)
        # Before the key is requested, which must be used within seconds: on a busy machine loading TVM takes longer.
        _import_rpc()
        host, port, match_key = ask_for_board(tracker, key, self._claim, request_timeout_s, doubted)
        self._relay = Relay(host, port)
        self._functions: dict[str, Any] = {}
        self._programs = UploadCache(self._keep)
        try:
            self._session = self._connect(match_key)
            if self._claim is not None:
                self._claim_board(self._claim)
            self.description = self._describe()
            self._simulated = self.description.simulated
            is_emulated = self._simulated and self.description.architecture != platform.machine()
            self._emulating_s = protocol.EMULATING_S if is_emulated else 0.0
            if reason := self.description.clocks.unsafe:
                raise BoardUnsafeError(
                    f"board {key} is unsafe: {reason}",
                    "Its results are invalid. Examine it; then, on the board: device-agent clocks restore",
                )
        except BaseException:
            self._relay.cut()
            raise

    @property
    def name(self) -> str:
        """The board's own name: without the tracker's suffix for one match."""
        return self.key.partition("/")[2].partition(":")[0]

    @property
    def sent_bytes(self) -> int:
        return self._relay.sent_bytes

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time a candidate on the board (see `device_agent.protocol`). Raises DeadlineError, BoardLostError.

        Raises PermanentError where the agent failed, InvalidReplyError for an invalid answer, BoardHostileError for an
        attack.
        """
        deadline = plan_deadline_s(spec, len(library)) + self._emulating_s
        return self._ask(protocol.MEASURE, deadline, Outcome, spec.to_json(), library)

    def run_model(
        self, spec: RunSpec, program: bytes | BufferName, inputs: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Outcome, Arrays]:
        """Run a program on inputs; the outputs come back in order. Raises what `measure` raises.

        A program that was run before is not sent again.
        """
        packed = pack_arrays(inputs)
        try:
            digest = self._programs.find(program)
        except protocol.ProtocolError as error:
            raise self._doubt(error) from error
        # One that is there is only read, ten times as fast at least.
        size = 2 * len(packed) + (2 * len(program) if digest is None else len(program) // 5)
        deadline = plan_deadline_s(spec, size) + self._emulating_s
        if digest is None:
            answer = self._call(protocol.RUN_MODEL, deadline, spec.to_json(), read(program), packed)
        else:
            answer = self._call(protocol.RUN_KEPT, deadline, spec.to_json(), digest, packed)
        try:
            text, outputs = protocol.unpack_frame(answers.read_bytes(answer))
            if outputs and not spec.return_outputs:
                raise protocol.ProtocolError(f"{len(outputs)} bytes of outputs that were not requested")
            arrays = unpack_arrays(outputs) if outputs else {}
        except HarmfulArraysError as error:
            raise self._hostile_error(str(error)) from error
        except protocol.ProtocolError as error:
            raise self._doubt(error) from error
        return self._read(Outcome, text), arrays

    def pin(self, point: OperatingPoint) -> PinReport:
        """Pin the board's clocks at a point until `unpin`, another `pin` or any end of the session.

        A point that the board refuses is a report, not an error. Raises what `measure` raises.
        """
        return self._ask(protocol.PIN, PIN_TIMEOUT_S, PinReport, point.to_json())

    def unpin(self) -> PinReport:
        """Restore the clocks from before `pin`; ok where none are pinned. Raises what `measure` raises."""
        return self._ask(protocol.UNPIN, PIN_TIMEOUT_S, PinReport)

    def power(self, spec: PowerSpec) -> PowerTrace:
        """Sample the board's power for `spec.seconds`. Raises what `measure` raises."""
        return self._ask(protocol.POWER, spec.seconds + _CALL_GRACE_S, PowerTrace, spec.to_json())

    def cut(self) -> None:
        """End the running call, and the session with it. From any thread; the owner still calls `close`."""
        self._relay.cut()

    def close(self) -> None:
        """Close the session. Never blocks; safe to call twice."""
        # Dropping TVM's session first would send a farewell to a board that may not read; the cut ends both sides at
        # once.
        self._relay.cut()
        self._functions.clear()
        self._session = None

    def _claim_board(self, claim: LeaseClaim) -> None:
        try:
            report = self._ask(protocol.CLAIM, CLAIM_TIMEOUT_S, ClaimReport, claim.to_json())
        except PermanentError:
            self._describe()  # an agent of another version has no such function, and says so here
            raise
        require_latest(self.key, report)

    def _keep(self, digest: str, program: bytes | BufferName) -> object:
        deadline = _CALL_GRACE_S + 2 * len(program) / _SLOWEST_BYTES_PER_S
        return self._call(protocol.KEEP_PROGRAM, deadline, digest, read(program))

    def _connect(self, match_key: str) -> Any:
        rpc = _import_rpc()
        host, port = self._relay.address
        return self._guarded("connecting", CONNECT_TIMEOUT_S, lambda: rpc.connect(host, port, match_key))

    def _describe(self) -> Description:
        try:
            text = self._call(protocol.DESCRIBE, DESCRIBE_TIMEOUT_S)
            # Before the rest is read: fields of another version would look like garbage.
            answers.require_own_protocol(self.key, answers.read_text(text))
        except UnavailableError:
            raise
        except (PermanentError, protocol.ProtocolError) as error:
            raise UnavailableError(
                f"the board {self.key} does not speak our protocol: {error}",
                "It may run a stock TVM server or another version of device-agent; update it.",
            ) from error
        return self._read(Description, text)

    def _ask(self, function: str, deadline_s: float, kind: type[Answer], *arguments: str | bytes) -> Answer:
        return self._read(kind, self._call(function, deadline_s, *arguments))

    def _read(self, kind: type[Answer], answer: object) -> Answer:
        try:
            return answers.read_answer(kind, answer, self.name, self._simulated)
        except protocol.ProtocolError as error:
            raise self._doubt(error) from error

    def _doubt(self, error: protocol.ProtocolError) -> InvalidReplyError:
        return InvalidReplyError(f"invalid reply from the agent on {self.key}: {error}")

    def _call(self, function: str, deadline_s: float, *arguments: str | bytes) -> Any:
        def call() -> Any:
            # Kept until the session ends: dropping a remote function makes TVM tell the board and wait for its answer
            # while it holds the interpreter's lock, which the relay's threads need to carry that answer.
            if function not in self._functions:
                self._functions[function] = self._session.get_function(function)
            return self._functions[function](*arguments)

        upload = sum(len(each) for each in arguments if isinstance(each, bytes))
        answer = self._guarded(function, deadline_s, call, upload)
        if not isinstance(answer, str | bytes | bytearray):
            # It may be a remote handle, whose end TVM would tell the board as above. Not once this is cut.
            self._relay.cut()
            raise self._doubt(protocol.ProtocolError(f"{function} answered a {type(answer).__name__}"))
        return answer

    def _guarded(self, what: str, deadline_s: float, work: Any, upload_bytes: int = 0) -> Any:
        """Do `work`, cutting the connection when the deadline passes: TVM's client would wait for ever.

        A big upload has a deadline of its own, which comes first.
        """
        overrun = threading.Event()
        waited_for = f"the board {self.key} did not answer {what} within {deadline_s:.1f} s"
        sent_before = self._relay.sent_bytes

        def cut() -> None:
            overrun.set()
            self._relay.cut()

        def check_upload() -> None:
            nonlocal waited_for
            if self._relay.sent_bytes - sent_before < upload_bytes:
                waited_for = (
                    f"the board {self.key} did not take the upload of {upload_bytes} bytes within {upload_s:.1f} s"
                )
                cut()

        timers = [threading.Timer(deadline_s, cut)]
        upload_s = _UPLOAD_GRACE_S + upload_bytes / _SLOWEST_BYTES_PER_S
        if upload_bytes >= _SEEN_UPLOAD_BYTES and upload_s < deadline_s:
            timers.append(threading.Timer(upload_s, check_upload))
        for timer in timers:
            timer.daemon = True
            timer.start()
        started = time.monotonic()
        try:
            result = work()
        except Exception as error:  # TVM raises its own, and any class that the far side named
            if overrun.is_set():
                raise DeadlineError(waited_for) from error
            self._raise_if_refused()
            # The relay hears of a lost board a moment after TVM's client does.
            if self._relay.board_ended.wait(0.2):
                elapsed = time.monotonic() - started
                raise BoardLostError(f"the board {self.key} hung up after {elapsed:.1f} s of {what}") from error
            reason = str(error).strip().splitlines()
            raise PermanentError(
                f"{what} failed on {self.key}: {reason[-1] if reason else type(error).__name__}"
            ) from error
        finally:
            for timer in timers:
                timer.cancel()
        if overrun.is_set():  # the answer and the cut crossed; the session is useless with any answer
            raise DeadlineError(waited_for)
        self._raise_if_refused()
        return result

    def _raise_if_refused(self) -> None:
        if refused := self._relay.refused:
            raise self._hostile_error(refused)

    def _hostile_error(self, sent: str) -> BoardHostileError:
        self._relay.cut()
        return BoardHostileError(
            f"the board {self.key} attacked us and was cut off: it sent {sent}",
            "It is quarantined. Examine it before it is used again: it may have been taken over.",
        )


def _import_rpc() -> Any:
    """Import TVM's RPC client, with the runtime library alone unless the compiler is loaded already."""
    chosen = os.environ.get("TVM_USE_RUNTIME_LIB")
    if "tvm" not in sys.modules:
        os.environ["TVM_USE_RUNTIME_LIB"] = chosen or "1"
        from tvm_ffi import core, registry

        skip_missing_types(core, registry)
    try:
        from tvm import rpc
    finally:
        # TVM has read it; left behind, it would keep the compiler from this process's children.
        if chosen is None:
            os.environ.pop("TVM_USE_RUNTIME_LIB", None)
    return rpc


def plan_deadline_s(spec: MeasureSpec | RunSpec, size: int) -> float:
    """Plan how long to wait for a call that carries `size` bytes: longer than any limit of the board."""
    deadline_s = spec.limits.total_s + _CALL_GRACE_S + size / _SLOWEST_BYTES_PER_S
    if spec.device == protocol.GPU:
        deadline_s += protocol.PREPARE_S
    if spec.start is not None:
        deadline_s += spec.start.deadline_s
    if spec.energy is not None:
        # The last repetition begins before the limit and may end after it.
        deadline_s += spec.energy.idle_s + 1.5 * spec.energy.limit_s
    return deadline_s
