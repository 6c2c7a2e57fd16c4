"""A process that holds clocks, to be killed and stopped: `clock_holder.py SOCKET [--fork]`.

Says `held`, then carries out lines from its input: `write PATH TEXT`, `begin NAME`, `restore`; each is answered by `ok`
or the error. With `--fork` a forked process lives on beside it, as a worker beside its session; it is named first.
"""

from __future__ import annotations

import os
import signal
import sys

from device_agent.clocks.client import HelperClient
from device_agent.errors import AgentError
from tests.clock_tree import PIN


def main() -> None:
    client = HelperClient(sys.argv[1])
    client.begin("a holder")
    for path, text in PIN:
        client.write(path, text)
    if "--fork" in sys.argv:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        print(pid)
    print("held", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            {"write": client.write, "begin": client.begin, "restore": client.restore}[command](*arguments)
            print("ok", flush=True)
        except (AgentError, OSError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
