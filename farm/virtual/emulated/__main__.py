"""`python -m farm.virtual.emulated`: see `server.py`."""

from farm.virtual.emulated.server import main

main()
