"""What the coordinator tells Prometheus about itself. Boards tell their own (`device_agent/metrics.py`)."""
