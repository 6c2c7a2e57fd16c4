"""Power sensors of a board: finding them, sampling them, and turning samples into honest energy."""
