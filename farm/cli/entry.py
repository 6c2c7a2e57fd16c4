"""The console script. It answers `--version` before it loads any command."""

from __future__ import annotations

import io
import sys

from farm.version import __version__


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that the encoding of the terminal or pipe lacks become "?".
        sys.stdout.reconfigure(errors="replace")
    if sys.argv[1:] == ["--version"]:
        print(f"tvm-farm {__version__}")
        sys.exit(0)
    from farm.cli.main import main as run

    run()
