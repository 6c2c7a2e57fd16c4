"""The main job end to end on one machine, as `farm quickstart` does it. See `run`."""
