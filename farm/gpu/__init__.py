"""Code for boards' GPUs, made on a machine without one: CUDA C to PTX, PTX checked, the board's plug-in built.

Running it belongs to the agent (`device_agent/native`, `device_agent/virtual/gpu`).
"""
