"""`python -m farm.campaign.engine`: the engine of campaigns as a process. Commands that need it start it."""

from __future__ import annotations

import sys

from farm.campaign.engine.process import main

if __name__ == "__main__":
    sys.exit(main())
