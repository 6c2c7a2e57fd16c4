"""The agent on a board: serves TVM RPC, runs candidates in worker processes, and reports evidence.

Nothing here imports `farm`, ray or a database: a board installs this package alone.
"""

__version__ = "0.2.0"
