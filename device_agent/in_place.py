"""A function's data where a model has them: input and result as functions before left them.

That weights are cold is `arguments.allocate_turns`' business.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

# A model writes a function's result into memory that was used a few results before: whether a near cache still has it
# goes with their size. What exceeds all caches needs no more.
_RESULTS, _MOST_BYTES = 4, 16 << 20


class _Group(ctypes.Structure):
    """TVM's `TVMParallelGroupEnv`."""

    _fields_ = (("sync_handle", ctypes.c_void_p), ("tasks", ctypes.c_int32))


# TVM's `FTVMParallelLambda`: number of the task, its group, data of whoever launches.
_Task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Group), ctypes.c_void_p)


class Place:
    """Calls of a function on the processor, all but its weights where a model would have them.

    `beside_s`: what was done between two of them (s), by the last run.
    """

    def __init__(self, arguments: list[Any]) -> None:
        """`arguments` are the function's, the result last."""
        self.beside_s = 0.0
        self._produce = make_producer(arguments[0])
        self._results = itertools.cycle(copy_result(arguments[-1]))

    def run(self, function: Any, following: Iterator[list[Any]], calls: int) -> float:
        """Seconds per call, each with the next of the sets of arguments; one call more is not counted."""
        taken_s = began = 0.0
        for number in range(calls + 1):
            *given, _ = next(following)
            self._produce()
            begun = time.perf_counter()
            function(*given, next(self._results))
            ended = time.perf_counter()
            if number:
                taken_s += ended - begun
            else:
                began = ended
        self.beside_s = (ended - began - taken_s) / calls
        return taken_s / calls


def make_producer(tensor: Any) -> Callable[[], None]:
    """What writes a tensor's values anew: each of TVM's threads an equal part, as those of the function before would.

    TVM's threads are those that run the candidate, and part k of a parallel loop is always the same thread's.
    """
    import tvm.runtime

    source = tvm.runtime.empty(tensor.shape, tensor.dtype, tvm.runtime.cpu())
    tensor.copyto(source)
    size = count_bytes(tensor)

    def write(task: int, group: Any, _: Any) -> int:
        first, end = (size * at // group.contents.tasks for at in (task, task + 1))
        ctypes.memmove(tensor.data_ptr() + first, source.data_ptr() + first, end - first)
        return 0

    launch, task = ctypes.CDLL(None).TVMBackendParallelLaunch, _Task(write)

    def produce() -> None:
        launch(task, None, 0)

    return produce


def copy_result(tensor: Any) -> list[Any]:
    """A tensor and others like it, for calls to take turns among."""
    import tvm.runtime

    size = count_bytes(tensor)
    count = min(_RESULTS, 1 + _MOST_BYTES // max(1, size))
    found = [tensor, *(tvm.runtime.empty(tensor.shape, tensor.dtype, tvm.runtime.cpu()) for _ in range(count - 1))]
    for each in found:
        ctypes.memset(each.data_ptr(), 0, size)  # pages come at the first write, which is not to be timed
    return found


def count_bytes(tensor: Any) -> int:
    """What a tensor takes."""
    return int(math.prod(tensor.shape) * tensor.dtype.itemsize)
