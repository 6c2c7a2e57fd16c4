"""`farm quickstart`: tune, compile, verify, time and sweep one model on this machine. See `run`."""
