"""Talk to one board: a session with deadlines, checks of its replies, statistics of samples."""
