"""Processes of ours and of others on this machine: children, partners, listeners, and one farm at a time."""
