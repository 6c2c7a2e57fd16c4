"""Talk to one board: a session with deadlines, what its answers mean, and the statistics of samples."""
