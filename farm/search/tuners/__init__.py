"""Propose candidates for a workload and learn from its trials: tuners, cost model, correction."""
