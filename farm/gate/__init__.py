"""Whether a change made a model worse: measured in turns against a baseline's artifact, decided by intervals."""
