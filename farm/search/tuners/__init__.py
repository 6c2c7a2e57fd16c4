"""Which candidates of a workload are tried next, and what is learnt from those that were."""
