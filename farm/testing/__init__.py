"""Doubles of the farm's parts, for tests and benchmarks."""
