"""Processes on this machine: children, workers, listeners, confined readers, the machine lock."""
