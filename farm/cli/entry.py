"""The console script. Who completes a line, or asks for the version, is answered before any command is loaded."""

from __future__ import annotations

import io
import os
import sys

from farm.version import __version__


def tell_version() -> None:
    """Print which farm this is."""
    print(f"tvm-farm {__version__}")


def main() -> None:
    """Answer a shell, or run the command line; leaves by SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that the encoding of the terminal or pipe lacks become "?".
        sys.stdout.reconfigure(errors="replace")
    if sys.argv[1:] == ["--version"]:
        tell_version()
        sys.exit(0)
    from farm.cli import completing

    if shell := os.environ.get(completing.VARIABLE):
        print(completing.answer(shell, sys.argv[1:]))
        sys.exit(0)
    from farm.cli.main import main as run

    run()
