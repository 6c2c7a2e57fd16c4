"""Run aarch64 code in a CPU emulator, count its instructions and estimate its latency by a model of the core.

`server.py` is a separate process: the emulator, Unicorn, is under the GPL, version 2, and must not be loaded into the
agent. The agent's workers use it through `client.py`. See docs/adr/0032.
"""
