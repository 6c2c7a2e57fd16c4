"""Extract one line from TVM's errors, whose messages print whole functions around it."""

from __future__ import annotations

# Enough for an operator with its attributes.
_LONGEST = 400
_VERDICT = "Error message:"


def find_reason(error: BaseException) -> str:
    """Return the sentence that names the fault; the class name of the error where there is none.

    It follows "Error message:" in schedule errors, else it is the first line, joined with the next ones after a colon.
    Comments of a printed function are skipped.
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
