"""Names that stand for many, as Ansible writes them: `nano-[01:16]`. What the names are used for is not known here."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

# A longer range is a slip of the finger; a rack that is larger can be written as two ranges.
MAX_EXPANDED = 1000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_MOST_DIGITS = 12


def expand(pattern: str) -> list[str]:
    """Every name that `pattern` stands for; itself alone where it holds no range.

    `[first:last]` or `[first:last:step]`, both ends included; numbers, or one letter each. Where `first` has leading
    zeros all have as many digits. Several ranges give every combination, the last one moving fastest. Source: Ansible's
    user guide, "Adding ranges of hosts". Raises ValueError saying what is wrong, before anything is expanded.
    """
    pieces = _BRACKETS.split(pattern)
    # What was captured stands at the odd places.
    texts, ranges = pieces[::2], [_parse(inner) for inner in pieces[1::2]]
    if any(bracket in text for text in texts for bracket in "[]"):
        raise ValueError(f"{pattern!r} has a bracket without its partner")
    count = math.prod(len(values) for values, _ in ranges)
    if count > MAX_EXPANDED:
        raise ValueError(f"{pattern!r} stands for {count}; at most {MAX_EXPANDED} are taken, so write several ranges")
    choices = [[_spell(value, width) for value in values] for values, width in ranges]
    return [
        "".join(itertools.chain.from_iterable(itertools.zip_longest(texts, chosen, fillvalue="")))
        for chosen in itertools.product(*choices)
    ]


def _parse(inner: str) -> tuple[range, int | None]:
    """Numbers or code points of one range, and the digits of each (0: as many as needed; None: letters)."""
    parts = inner.split(":")
    if len(parts) not in {2, 3} or not all(parts):
        raise ValueError(f"the range [{inner}] must be [first:last] or [first:last:step]")
    first, last = parts[:2]
    if any(len(part) > _MOST_DIGITS for part in parts):
        raise ValueError(f"the range [{inner}] has a number of more than {_MOST_DIGITS} digits")
    step = parts[2] if len(parts) > 2 else "1"
    if not re.fullmatch(r"0*[1-9][0-9]*", step):
        raise ValueError(f"the range [{inner}] has the step {step!r}; it must be a whole number of at least 1")
    if re.fullmatch(r"[0-9]+", first) and re.fullmatch(r"[0-9]+", last):
        width = len(first) if first.startswith("0") and len(first) > 1 else 0
        if width and len(last) != width:
            raise ValueError(f"the range [{inner}] has leading zeros, so both ends must have as many digits")
        return _ascending(int(first), int(last), int(step), inner), width
    for kind in ("[a-z]", "[A-Z]"):
        if re.fullmatch(kind, first) and re.fullmatch(kind, last):
            return _ascending(ord(first), ord(last), int(step), inner), None
    raise ValueError(f"the range [{inner}] must go from a number to a number, or from a letter to a letter")


def _ascending(first: int, last: int, step: int, inner: str) -> range:
    if last < first:
        raise ValueError(f"the range [{inner}] ends before it begins")
    return range(first, last + 1, step)


def _spell(value: int, width: int | None) -> str:
    return chr(value) if width is None else f"{value:0{width}d}"


def number(name: str, count: int) -> Sequence[str]:
    """`count` names made of one: `sim-1`, `sim-2` …, with leading zeros so that they sort."""
    width = len(str(count))
    return [f"{name}-{index:0{width}d}" for index in range(1, count + 1)]
