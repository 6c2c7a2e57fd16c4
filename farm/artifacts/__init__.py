"""Compiled models: made from records, checked against a reference, timed on a board."""
