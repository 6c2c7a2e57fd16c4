"""Run aarch64 code in a CPU emulator, count its instructions and estimate its latency by a model of the core.

`server.py` is a process of its own: the emulator, Unicorn, is under the GPL, version 2, and nothing of it is loaded
into the agent. The agent's workers speak to it through `client.py`. Why it is so: docs/adr/0032.
"""
