"""`python -m device_agent.emulated`: see `server.py`."""

from device_agent.emulated.server import main

main()
