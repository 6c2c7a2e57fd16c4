"""The console script. A shell that completes a line is answered before anything of the commands is loaded."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Answer a shell, or run the command line; leaves by SystemExit."""
    from farm.cli import completing

    if shell := os.environ.get(completing.VARIABLE):
        print(completing.answer(shell, sys.argv[1:]))
        sys.exit(0)
    from farm.cli.main import main as run

    run()
