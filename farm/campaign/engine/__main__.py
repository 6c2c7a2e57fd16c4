"""`python -m farm.campaign.engine`: the engine of campaigns as a process. Commands that need it start it.

With `--take-over NAME...` it continues campaigns whose engine was killed, on this host's engine.
"""

from __future__ import annotations

import sys

from farm.campaign.engine import control, process

if __name__ == "__main__":
    sys.exit(control.take_over(sys.argv[2:]) if sys.argv[1:2] == ["--take-over"] else process.main())
