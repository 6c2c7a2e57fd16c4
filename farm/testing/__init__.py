"""A whole farm that a seed decides, and what is played in it; benchmarks play boards too."""
