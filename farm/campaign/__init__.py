"""Campaigns: which workload gets the next trial (scheduler, pure) and the machinery that carries it out (engine)."""
