"""A process that makes clients: for every line on its input it forks one, which pins a board and keeps it busy.

Importing TVM takes a second, forking a millisecond: a test that kills hundreds of clients cannot start each anew. The
lines are JSON: {"port", "key", "point", "library"}; each client writes {"pid", "status"} once it has tried to pin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    os.environ["TVM_USE_RUNTIME_LIB"] = "1"
    import tvm.rpc

    from device_agent import protocol

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    os.setpgid(0, 0)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            try:
                _live(tvm.rpc, protocol, order)
            except Exception as error:
                _say(status="lost", message=f"{type(error).__name__}: {error}"[:500])
            finally:
                os._exit(1)
    os.killpg(0, signal.SIGKILL)


def _live(rpc: object, protocol: object, order: dict[str, object]) -> None:
    session = rpc.connect("127.0.0.1", order["port"], key=order["key"])  # type: ignore[attr-defined]
    report = json.loads(session.get_function(protocol.PIN)(json.dumps(order["point"])))  # type: ignore[attr-defined]
    _say(status=report["status"], message=report["message"])
    library = Path(str(order["library"])).read_bytes()
    spec = protocol.MeasureSpec(  # type: ignore[attr-defined]
        (protocol.TensorSpec((64, 64), "float32"),) * 3,  # type: ignore[attr-defined]
        repeat=50,
        min_repeat_s=0.02,
    )
    measure = session.get_function(protocol.MEASURE)  # type: ignore[attr-defined]
    while True:
        measure(spec.to_json(), library)


def _say(**word: str) -> None:
    os.write(1, (json.dumps({"pid": os.getpid(), **word}) + "\n").encode())


if __name__ == "__main__":
    main()
