"""Decide what the fleet does next, for all campaigns. Plain state, pure rules, and a worker that carries them out."""
