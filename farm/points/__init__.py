"""Operating points: what a user asks for, and the grid of those that a board has."""
