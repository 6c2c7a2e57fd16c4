"""Which farm this is. It stands alone, so that whoever only wants to know it imports nothing else."""

__version__ = "0.2.0"
