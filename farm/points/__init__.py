"""Operating points: parse them, and make a board's grid of them."""
