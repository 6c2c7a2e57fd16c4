"""One board, held through TVM's RPC: open under a lease, call the agent's functions, cut what overruns, close.

Coroutines; `BlockingSession` is for those who wait with their thread.

The caller retries and chooses boards; a broken session is closed and a new one opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import anyio
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
from farm.connectivity.frames import RefusedError
from farm.connectivity.tracker import Tracker
from farm.connectivity.wire import HungUpError, RemoteError, UploadStalledError, Wire
from farm.errors import (
    BoardHostileError,
    BoardLostError,
    BoardUnsafeError,
    DeadlineError,
    InvalidReplyError,
    PermanentError,
    UnavailableError,
)
from farm.measure import answers
from farm.measure.answers import AgentAddress, ask_for_board, require_latest
from farm.measure.arrays import Arrays, HarmfulArraysError, pack_arrays, unpack_arrays
from farm.values import Lease

# Below this, asking for a program by name costs as much as sending it.
LEAST_BYTES = 256 << 10
# More than any agent keeps.
_MOST = 1024

_log = logging.getLogger(__name__)

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
T = TypeVar("T")


class UploadCache:
    """The upload cache of one session. `keep` has the board keep a program, by its digest; it returns what the board
    has then.
    """

    def __init__(self, keep: Callable[[str, bytes], Awaitable[object]]) -> None:
        self._keep = keep
        self._there: frozenset[str] = frozenset()
        self._can_keep = True
        self._latest: tuple[bytes, str] = (b"", "")

    async def find(self, program: bytes) -> str | None:
        """Return the digest of a program that the board has; None where it must be sent with the run.

        Raises what `keep` raises except PermanentError: an agent without room still runs it. Raises ProtocolError for
        an invalid answer.
        """
        if not self._can_keep or len(program) < LEAST_BYTES:
            return None
        if program is not self._latest[0]:
            self._latest = program, hashlib.sha256(program).hexdigest()
        digest = self._latest[1]
        if digest not in self._there:
            try:
                self._there = _read(await self._keep(digest, program))
            except PermanentError as error:
                _log.info("programs are sent with every run: %s", error)
                self._can_keep = False
                return None
        return digest if digest in self._there else None

    async def require(self, digest: str, content: npt.NDArray[Any]) -> None:
        """Have the board keep a file, by its digest. Raises what `keep` raises, ProtocolError as `find`."""
        if digest not in self._there:
            self._there = _read(await self._keep(digest, content.tobytes()))


def _read(answer: object) -> frozenset[str]:
    try:
        digests = json.loads(answers.read_text(answer))
    except ValueError as error:
        raise ProtocolError(f"programs are kept, but which is not said: {error}") from error
    if not isinstance(digests, list) or len(digests) > _MOST or not all(isinstance(each, str) for each in digests):
        raise ProtocolError("programs are kept, but which is not said")
    return frozenset(digests)


class BoardSession:
    """The exclusive use of one board until `aclose`. One call at a time; useless after any error but PermanentError,
    and after a cancelled call.
    """

    def __init__(self, key: str, wire: Wire) -> None:
        """For `open`."""
        self.key = key
        self.description: Description
        self._wire = wire
        self._simulated: bool | None = None
        self._emulating_s = 0.0
        self._programs = UploadCache(self._keep)

    @classmethod
    async def open(
        cls,
        tracker: Tracker | AgentAddress,
        key: str,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        lease: Lease | None = None,
        *,
        doubted: bool = False,
    ) -> BoardSession:
        """Wait for the board and connect. Raises DeadlineError, BoardLostError, UnavailableError, BoardUnsafeError.

        With a lease, the agent first ends the sessions of earlier leases of the store, and later refuses this one once
        a newer lease has claimed the board. A client without a lease is waited for, up to BoardBusyError. Raises
        LeaseOverError where a later lease exists already.

        `doubted`: find out who is at fault if the board does not answer; see `ask_for_board`.
        """
        claim = None if lease is None else answers.to_claim(lease)
        host, port, match_key = await ask_for_board(tracker, key, claim, request_timeout_s, doubted)
        connecting = _guarded(key, "connecting", CONNECT_TIMEOUT_S, Wire.connect(host, port, match_key))
        session = cls(key, await connecting)
        try:
            await session._begin(claim)
        except BaseException:
            await session.aclose()
            raise
        return session

    async def _begin(self, claim: LeaseClaim | None) -> None:
        if claim is not None:
            await self._claim_board(claim)
        self.description = await self._describe()
        self._simulated = self.description.simulated
        if self._simulated and self.description.architecture != platform.machine():
            self._emulating_s = protocol.EMULATING_S
        if reason := self.description.clocks.unsafe:
            raise BoardUnsafeError(
                f"board {self.key} is unsafe: {reason}",
                "Its results are invalid. Examine it; then, on the board: device-agent clocks restore",
            )

    @property
    def name(self) -> str:
        """The board's own name: without the tracker's suffix for one match."""
        return self.key.partition("/")[2].partition(":")[0]

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    async def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time a candidate on the board (see `device_agent.protocol`). Raises DeadlineError, BoardLostError.

        Raises PermanentError where the agent failed, InvalidReplyError for an invalid answer, BoardHostileError for an
        attack.
        """
        deadline = plan_deadline_s(spec, len(library)) + self._emulating_s
        return await self._ask(protocol.MEASURE, deadline, Outcome, spec.to_json(), library)

    async def run_model(
        self, spec: RunSpec, program: bytes, inputs: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Outcome, Arrays]:
        """Run a program on inputs; the outputs come back in order. Raises what `measure` raises.

        A program that was run before is not sent again. The inputs of a `Command` are its files, by name, as bytes.
        """
        if spec.command is not None:
            for name, wanted in spec.command.files.items():
                await self._programs.require(wanted, inputs[name])
        packed = pack_arrays({} if spec.command is not None else inputs)
        try:
            digest = await self._programs.find(program)
        except protocol.ProtocolError as error:
            raise self._doubt(error) from error
        # One that is there is only read, ten times as fast at least.
        size = 2 * len(packed) + (2 * len(program) if digest is None else len(program) // 5)
        deadline = plan_deadline_s(spec, size) + self._emulating_s
        if digest is None:
            answer = await self._call(protocol.RUN_MODEL, deadline, spec.to_json(), program, packed)
        else:
            answer = await self._call(protocol.RUN_KEPT, deadline, spec.to_json(), digest, packed)
        try:
            text, outputs = protocol.unpack_frame(answers.read_bytes(answer))
            if outputs and not spec.return_outputs:
                raise protocol.ProtocolError(f"{len(outputs)} bytes of outputs that were not requested")
            arrays = unpack_arrays(outputs) if outputs else {}
        except HarmfulArraysError as error:
            await self.aclose()
            raise _hostile_error(self.key, str(error)) from error
        except protocol.ProtocolError as error:
            raise self._doubt(error) from error
        return self._read(Outcome, text), arrays

    async def pin(self, point: OperatingPoint) -> PinReport:
        """Pin the board's clocks at a point until `unpin`, another `pin` or any end of the session.

        A point that the board refuses is a report, not an error. Raises what `measure` raises.
        """
        return await self._ask(protocol.PIN, PIN_TIMEOUT_S, PinReport, point.to_json())

    async def unpin(self) -> PinReport:
        """Restore the clocks from before `pin`; ok where none are pinned. Raises what `measure` raises."""
        return await self._ask(protocol.UNPIN, PIN_TIMEOUT_S, PinReport)

    async def power(self, spec: PowerSpec) -> PowerTrace:
        """Sample the board's power for `spec.seconds`. Raises what `measure` raises."""
        return await self._ask(protocol.POWER, spec.seconds + _CALL_GRACE_S, PowerTrace, spec.to_json())

    async def aclose(self) -> None:
        """Close the session at once; a running call ends. Safe to call twice."""
        await self._wire.aclose()

    async def _claim_board(self, claim: LeaseClaim) -> None:
        try:
            report = await self._ask(protocol.CLAIM, CLAIM_TIMEOUT_S, ClaimReport, claim.to_json())
        except PermanentError:
            await self._describe()  # an agent of another version has no such function, and says so here
            raise
        require_latest(self.key, report)

    async def _keep(self, digest: str, program: bytes) -> object:
        deadline = _CALL_GRACE_S + 2 * len(program) / _SLOWEST_BYTES_PER_S
        return await self._call(protocol.KEEP_PROGRAM, deadline, digest, program)

    async def _describe(self) -> Description:
        try:
            text = await self._call(protocol.DESCRIBE, DESCRIBE_TIMEOUT_S)
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

    async def _ask(self, function: str, deadline_s: float, kind: type[Answer], *arguments: str | bytes) -> Answer:
        return self._read(kind, await self._call(function, deadline_s, *arguments))

    def _read(self, kind: type[Answer], answer: object) -> Answer:
        try:
            return answers.read_answer(kind, answer, self.name, self._simulated)
        except protocol.ProtocolError as error:
            raise self._doubt(error) from error

    def _doubt(self, error: protocol.ProtocolError) -> InvalidReplyError:
        return InvalidReplyError(f"invalid reply from the agent on {self.key}: {error}")

    async def _call(self, function: str, deadline_s: float, *arguments: str | bytes) -> str | bytes:
        """Call a function of the agent's. A big upload has a deadline of its own, which comes first."""
        upload = sum(len(each) for each in arguments if isinstance(each, bytes))
        upload_s = _UPLOAD_GRACE_S + upload / _SLOWEST_BYTES_PER_S
        call = self._wire.call(function, *arguments, upload_s=upload_s if upload >= _SEEN_UPLOAD_BYTES else math.inf)
        try:
            answer = await _guarded(self.key, function, deadline_s, call)
            if not isinstance(answer, str | bytes):
                raise self._doubt(protocol.ProtocolError(f"{function} answered a {type(answer).__name__}"))
        except PermanentError:
            raise
        except BaseException:
            await self.aclose()
            raise
        return answer


async def _guarded(key: str, what: str, deadline_s: float, work: Awaitable[T]) -> T:
    """Await `work` with a deadline, and translate the errors of the wire."""
    started = anyio.current_time()
    try:
        with anyio.fail_after(deadline_s):
            return await work
    except TimeoutError as error:
        raise DeadlineError(f"the board {key} did not answer {what} within {deadline_s:.1f} s") from error
    except UploadStalledError as error:
        raise DeadlineError(f"the board {key} {error}") from error
    except HungUpError as error:
        elapsed = anyio.current_time() - started
        raise BoardLostError(f"the board {key} hung up after {elapsed:.1f} s of {what}") from error
    except RefusedError as error:
        raise _hostile_error(key, str(error)) from error
    except RemoteError as error:
        reason = str(error).strip().splitlines()
        raise PermanentError(f"{what} failed on {key}: {reason[-1] if reason else 'it does not say why'}") from error


def _hostile_error(key: str, sent: str) -> BoardHostileError:
    return BoardHostileError(
        f"the board {key} attacked us and was cut off: it sent {sent}",
        "It is quarantined. Examine it before it is used again: it may have been taken over.",
    )


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
