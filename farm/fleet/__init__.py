"""Boards and the way to them: tracker, relay, the local farm. What is measured on a board is for `farm.measure`."""
