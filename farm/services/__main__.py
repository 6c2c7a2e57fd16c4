"""`python -m farm.services`: the services as a process. `farm up` and commands that need them start it."""

from __future__ import annotations

import sys

from farm.services.daemon import main

if __name__ == "__main__":
    sys.exit(main())
