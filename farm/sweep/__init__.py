"""Sweeps over clocks: `plan` chooses points, `run` measures them, `fit` models them, `export` writes results."""
