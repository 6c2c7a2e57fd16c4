"""The standard for a record: which finalist is measured next, which one wins, and the evidence. Pure."""
