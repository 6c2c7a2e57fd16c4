"""Of what TVM says when it fails, one line is kept: the one that matters."""

from __future__ import annotations

import pytest

from farm.search.tvm_errors import find_reason

SCHEDULE = """ScheduleError: An error occurred in the schedule primitive 'fuse'.

The IR with diagnostic is:
# from tvm.script import ir as I
(... 9 lines skipped ...)
            for i in range(64):
            ^^^^^^^^^^^^^^^^^^^
Error message: The loops can't be fused because the outer loop is not the parent of the inner loop
(... 3 lines skipped ...)"""
CODEGEN = """CodeGenVM cannot emit this Relax operator directly.
Offending call:
R.nn.conv2d_transpose(alloc1, metadata["ir.GenericConst"][0], strides=[2, 2])
# Metadata omitted. Use show_meta=True in script() method to show it."""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SCHEDULE, "The loops can't be fused because the outer loop is not the parent of the inner loop"),
        (
            CODEGEN,
            "CodeGenVM cannot emit this Relax operator directly. Offending call: R.nn.conv2d_transpose(alloc1, "
            'metadata["ir.GenericConst"][0], strides=[2, 2])',
        ),
        ("one line", "one line"),
        ("what failed:\nwhy\nwhere it was", "what failed: why"),
        ("# a comment alone\n(... 2 lines skipped ...)", "ValueError"),
        ("", "ValueError"),
        ("x" * 9999, "x" * 400),
    ],
)
def test_the_sentence_that_matters_is_kept(text: str, reason: str) -> None:
    """Printed functions, notes about what was left out and comments never stand for the error."""
    assert find_reason(ValueError(text)) == reason
