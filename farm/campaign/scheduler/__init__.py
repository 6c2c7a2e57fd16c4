"""Decide what the fleet does next, for all campaigns. Pure: state and events in, new state and decisions out."""
