"""One line of what TVM says when it fails: its messages print whole functions around the sentence that matters."""

from __future__ import annotations

# Enough for an operator with its attributes.
_LONGEST = 400
_VERDICT = "Error message:"


def find_reason(error: BaseException) -> str:
    """The sentence that says what is wrong; the name of the error's class where it says nothing.

    That is what follows "Error message:", as in schedules' errors, else the first line, with the next one where it
    ends in a colon or announces the call that offends. Comments of a printed function are never it.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith("#") and "lines skipped" not in line]
    if not lines:
        return type(error).__name__
    for line in lines:
        if line.startswith(_VERDICT) and line != _VERDICT:
            return line.removeprefix(_VERDICT).strip()[:_LONGEST]
    said = lines[:1]
    for line in lines[1:]:
        if not said[-1].endswith(":") and not line.endswith(":"):
            break
        said.append(line)
    return " ".join(said)[:_LONGEST]
