"""What boards and campaigns may be called: the one rule, for both sides.

Names go into tracker keys, file names, metrics and terminals; the tracker splits keys at colons, TVM at blanks.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# The rule as people are told it.
NAME_RULE = "up to 63 letters, digits, dots, dashes and underscores, a letter or digit first"


def is_name(text: str) -> bool:
    """Whether something may be called `text`."""
    return _NAME.fullmatch(text) is not None
