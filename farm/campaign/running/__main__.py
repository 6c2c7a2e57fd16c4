"""`python -m farm.campaign.running`: the engine of campaigns as a process. Commands that need it start it."""

from __future__ import annotations

import sys

from farm.campaign.running.process import main

if __name__ == "__main__":
    sys.exit(main())
