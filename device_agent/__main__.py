"""`python -m device_agent` is the same as `device-agent`."""

import sys

from device_agent.agent import main

sys.exit(main())
