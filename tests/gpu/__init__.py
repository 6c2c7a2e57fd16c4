"""Code for Jetson GPUs on any NVIDIA GPU: `bundle` builds a folder, whose `run` needs neither compiler nor network."""
