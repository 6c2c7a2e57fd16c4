"""What a fleet does next, for all campaigns on it: pure, state and time in, new state and decisions out."""
