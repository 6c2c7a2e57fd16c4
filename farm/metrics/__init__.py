"""The coordinator's metrics for Prometheus. Boards tell their own (`device_agent/metrics.py`)."""
