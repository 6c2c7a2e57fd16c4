"""The coordinator's metrics for Prometheus. Boards export their own (`device_agent/metrics.py`)."""
