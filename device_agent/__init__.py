"""The program on a board: serves TVM RPC, runs candidates in worker processes, reports what it saw.

Nothing here imports `farm`, ray or a database: a board installs this package alone.
"""

__version__ = "0.2.0"
