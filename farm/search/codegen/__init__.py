"""From a scheduled function to a linked library: compiler processes and their cache."""
