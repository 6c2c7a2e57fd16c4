"""Sweeps: which operating points to measure, what they say together, which one to ship. Pure: no board, no store.

Whoever runs a sweep asks `adaptive.decide_next` for the next point, measures it, and shows `summary.summarise_sweep`.
"""
