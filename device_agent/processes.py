"""Fork processes, and end them so that none is left behind.

A child is killed with its parent (`die_with_parent`). A parent adopts its orphaned descendants
(`become_subreaper`) and kills them (`kill_children`). Forking is safe because the agent's processes have one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import select
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

SESSIONS = "device-agent-"

_log = logging.getLogger(__name__)


# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
# A killed process is gone within milliseconds; one stuck in a driver may stay, and must not block the board.
KILL_TIMEOUT_S = 1.0
_PID = struct.Struct("<q")
_HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The kernel lists a thread for a moment after it was joined.
_LOOKS, _LOOK_PAUSE_S = 50, 0.001


@contextlib.contextmanager
def work_folder(prefix: str = SESSIONS) -> Iterator[Path]:
    """Create a folder whose name begins with `prefix`; also remove those of killed owners.

    An owner holds a lock on its folder, which the kernel releases at its death.
    """
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{prefix}*"):
        lock = _lock(left)
        if lock is not None:
            _log.info("removing %s, left by a killed process", left)
            remove_folder(left)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = _lock(folder)
    try:
        yield folder
    finally:
        remove_folder(folder)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock `folder`; return the descriptor, None if another process holds it or it belongs to another user."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None


def remove_folder(folder: Path) -> None:
    """Remove a folder even if its content changed its permissions; log what cannot be removed."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for path, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                Path(path).chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            _log.error("cannot remove %s", folder)


# A forked process has one thread; user-mode emulation adds its own.
_threads_at_birth = 1
# Children that serve this process for its lifetime: `kill_children` leaves them.
SPARED: set[int] = set()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`'s main thread ends; end at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that `kill_children` finds them.

    QEMU's user-mode emulation (up to 7.2 at least) refuses it; the next subreaper above then adopts them.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def forgo_privileges() -> None:
    """From now on, neither this process nor its children gain privileges by what they execute (setuid, sudo)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def fork(body: Callable[[], None]) -> int:
    """Run `body` in a child process with its own session and process group; return its pid.

    The child has default signal handling, dies with its parent, and ends when `body` returns or raises. It runs none of
    the parent's exit handlers or finalizers.
    """
    parent = os.getpid()
    # A signal between fork and the reset below would run the parent's handler in the child.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _run_child(parent, body)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    return pid


def _run_child(parent: int, body: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # TVM's handler symbolises the stack on a crash: slow, and unsafe on a corrupt heap.
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        global _threads_at_birth
        _threads_at_birth = count_threads()
        body()
        code = 0
    except BaseException:  # noqa: BLE001  the edge of a process: nothing may unwind into the parent's stack
        import traceback

        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def close_all_but(kept: set[int]) -> None:
    """Close inherited descriptors but keep their numbers taken: an object closed later must not hit a reused one."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {*kept, nothing}:
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def guard_group() -> Callable[[int], object]:
    """Start a process that outlives this one if it is killed, and then ends the last process group that it received.

    Returns how to send it one: the group's leader, 0 for none. Cheaper than to start each program by `fork`.
    """
    reading, writing = os.pipe()

    def guard() -> None:
        _prctl(_PR_SET_PDEATHSIG, 0)
        close_all_but({reading})
        leader = 0
        while received := os.read(reading, _PID.size):
            (leader,) = _PID.unpack(received)
        if leader:
            kill_group(leader)

    SPARED.add(fork(guard))
    os.close(reading)
    return lambda leader: os.write(writing, _PID.pack(leader))


def has_started_threads() -> bool:
    """Whether foreign code has started threads here, Python's own not counted.

    Python's (the heartbeat to the clock helper) hold no lock that a forked process could need.
    """
    return _stay_more(lambda: count_threads() - (threading.active_count() - 1), _threads_at_birth)


def has_more_threads(pid: int, than: int) -> bool:
    """Whether the child `pid` has more than `than` threads, those that are ending not counted."""
    return _stay_more(lambda: count_threads(pid), than)


def _stay_more(count: Callable[[], int], than: int) -> bool:
    for _ in range(_LOOKS):
        if count() <= than:
            return False
        time.sleep(_LOOK_PAUSE_S)
    return True


def count_threads(pid: int | None = None) -> int:
    """Count the threads of `pid` (default: this process); 0 once it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return len(os.listdir(f"/proc/{pid or 'self'}/task"))
    return 0


def find_children(pid: int | None = None) -> list[int]:
    """Pids of the children of `pid` (default: this process), adopted ones and zombies included."""
    pid = pid or os.getpid()
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except FileNotFoundError:  # the process is gone, or the kernel has no CONFIG_PROC_CHILDREN
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                # The command name may hold spaces and brackets; the parent is the second field after it.
                if int(Path(f"/proc/{int(entry)}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    children.append(int(entry))
    return children


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads; no error if it is gone."""
    for send in (os.killpg, os.kill):  # the group exists only once the child has called setsid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def kill_children(timeout_s: float = KILL_TIMEOUT_S) -> bool:
    """Kill and reap all children except the spared, and theirs as they are adopted.

    Return whether none is left after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while children := [pid for pid in find_children() if pid not in SPARED]:
        for pid in children:
            kill_group(pid)
        if reap(children[0], deadline) is None:
            return False
    return True


def has_ended(pid: int) -> bool:
    """Whether the child `pid` is dead. It stays a zombie, so that its pid is not reused."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def reap(pid: int, deadline: float) -> int | None:
    """Wait for the child `pid` until `deadline` (monotonic seconds); return its wait status, None if it still runs.

    A child that was reaped elsewhere counts as ended with exit code 0.
    """
    pause_s = 0.0002
    with contextlib.ExitStack() as stack:
        poll = None
        with contextlib.suppress(AttributeError, OSError):  # a kernel before 5.3
            pidfd = os.pidfd_open(pid)
            stack.callback(os.close, pidfd)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
        while True:
            if poll is not None:
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            try:
                reaped, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                return 0
            if reaped:
                return status
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.01)


def describe_end(status: int) -> str:
    """Describe how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal_name(os.WTERMSIG(status))}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11, a plain number for one unknown to Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
