"""Which board this is, and which clocks, sensors and tools it really has."""
