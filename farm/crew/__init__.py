"""A board as somebody who works on it has it: chosen, leased, connected, watched, blamed."""
