"""After how many rounds candidates are compared. Apart from `tie`, whose statistics take half a second to load."""

from __future__ import annotations

# Where the budget allows it.
LOOKS = (4, 8, 16)
# Less says nothing: two boards, or one and its own repetition.
LEAST_ROUNDS = 2
