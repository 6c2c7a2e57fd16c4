"""Detect the board type, its clocks, sensors and tools."""
