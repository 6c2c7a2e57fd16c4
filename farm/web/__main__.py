"""`python -m farm.web`: the page's server as a process of its own, for `farm up --web`."""

from __future__ import annotations

import logging
import sys

from farm import settings as farm_settings
from farm.errors import FarmError
from farm.web.serve import WebPlace, serve


def main() -> int:
    """Serve until told to end. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve(farm_settings.load(), WebPlace(), logging.getLogger(__name__).info)
    except FarmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
