"""Compile for boards' GPUs without a GPU: CUDA C to PTX, PTX checked, the board's plug-in built.

Running it belongs to the agent (`device_agent/native`, `farm/virtual/gpu`).
"""
