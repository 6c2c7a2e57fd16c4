"""Compiled models: compile from records, verify against a reference, package, deploy, time."""
