"""What a command on a board prints, both streams at once: collected up to a size and a deadline, or passed on."""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable

import paramiko

from farm.errors import PermanentError

_CHUNK = 1 << 16
# A program left running in the background may hold the output open for ever after the command has ended.
_LINGER_S = 0.5
# Far above what comes between two looks; a board that says more is cut off.
_PASSED_BYTES = 64 << 20


@dataclasses.dataclass
class Output:
    """`code` is None where the connection ended first."""

    code: int | None
    out: bytes
    err: bytes


def read_output(channel: paramiko.Channel, deadline: float, max_bytes: int) -> Output:
    """Read until the command has ended and its output too. `deadline` is monotonic.

    Raises TimeoutError, and PermanentError where a stream is longer than `max_bytes`.
    """
    out, err = bytearray(), bytearray()
    ended_at: float | None = None
    # Not `select`, which takes no descriptor above 1023: a coordinator of many boards has more.
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        # Looked at first: what came before the end is read after it.
        ended = channel.exit_status_ready()
        closed = channel.closed or channel.eof_received
        moved = _drain(channel, out, err, max_bytes)
        now = time.monotonic()
        if ended and ended_at is None:
            ended_at = now
        if (ended or channel.closed) and not moved:
            if closed or (ended_at is not None and now - ended_at > _LINGER_S):
                break
        elif now > deadline:
            raise TimeoutError
        if closed:
            # Nothing more will be printed; the descriptor is readable for good.
            channel.status_event.wait(max(0.0, min(0.1, deadline - now)))
        else:
            poll.poll(10 if ended else max(0, min(100, int(1000 * (deadline - now)))))
    return Output(_exit_code(channel), bytes(out), bytes(err))


def pass_output(channel: paramiko.Channel, take: Callable[[bytes, bytes], None]) -> int | None:
    """Give `take` what comes on both streams, as it comes, until the command has ended; returns its exit code, None
    where the connection ended first.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        ended = channel.exit_status_ready() or channel.closed
        out, err = bytearray(), bytearray()
        _drain(channel, out, err, _PASSED_BYTES)
        if out or err:
            take(bytes(out), bytes(err))
        elif ended:
            return _exit_code(channel)
        poll.poll(200)


def _drain(channel: paramiko.Channel, out: bytearray, err: bytearray, max_bytes: int) -> bool:
    moved = False
    for ready, receive, data in (
        (channel.recv_ready, channel.recv, out),
        (channel.recv_stderr_ready, channel.recv_stderr, err),
    ):
        while ready():
            data += receive(_CHUNK)
            moved = True
            if len(data) > max_bytes:
                raise PermanentError(f"the command printed more than {max_bytes} bytes", "Send its output to a file.")
    return moved


def _exit_code(channel: paramiko.Channel) -> int | None:
    if not channel.exit_status_ready():
        return None
    code = channel.recv_exit_status()
    # paramiko's word for "no status was sent": a signal ended the command, or the connection ended.
    return code if code >= 0 else None
