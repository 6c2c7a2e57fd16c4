"""Virtual boards: a model of the hardware behind the same kernel files, so that the agent runs unchanged."""
