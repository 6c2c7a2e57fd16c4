"""Virtual boards: a model of a board behind the same kernel files, so that the agent itself runs unchanged."""
