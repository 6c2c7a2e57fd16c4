"""A board's own aarch64 code, run on this machine in a CPU emulator, counted exactly and priced by a model of its core.

`server.py` is a process of its own: the emulator, Unicorn, is under the GPL, version 2, and nothing of it is loaded
into the agent. The agent's workers speak to it through `client.py`. Why it is so: docs/adr/0032.
"""
