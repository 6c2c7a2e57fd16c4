"""`python -m farm.virtual`: see `agent.py`."""

import sys

from farm.virtual.agent import main

sys.exit(main())
