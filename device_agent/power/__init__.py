"""A board's power sensors: find them, sample them, integrate energy with an interval."""
