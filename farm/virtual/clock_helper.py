"""`python -m farm.virtual.clock_helper`: the agent's clock helper, over a virtual board's files too."""

import sys

from device_agent.clocks.helper import main
from farm.virtual.client import SimulatedTree  # adds `virtual:SOCKET`

__all__ = ["SimulatedTree", "main"]

if __name__ == "__main__":
    sys.exit(main())
