"""Choose a workload's next candidates, and learn from its trials: tuners, cost model, correction."""
