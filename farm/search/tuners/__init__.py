"""Propose candidates for a workload and learn from its trials: tuners, cost model, correction."""

# A tuner's name, and the name of its method of `CampaignSearch`: campaign files are read without TVM.
TUNERS = {"random": "draw", "ga": "evolve", "xgb": "learn", "droplet": "descend", "grid": "enumerate"}
