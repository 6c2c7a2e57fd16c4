"""The map that is never changed: facts over plain maps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farm.campaign.scheduler.state import Table

# None takes a key out.
changes = st.lists(st.tuples(st.integers(0, 300), st.one_of(st.none(), st.integers())), max_size=60)


def after(table: Table[int, int], edits: list[tuple[int, int | None]]) -> Table[int, int]:
    draft = table.edit()
    for key, value in edits:
        if value is not None:
            draft[key] = value
        elif key in draft:
            draft.pop(key)
    return draft.freeze()


@given(changes, changes)
def test_a_changed_copy_is_right_and_the_original_unchanged(
    first: list[tuple[int, int | None]], second: list[tuple[int, int | None]]
) -> None:
    """An edit does what it would do to a dict, and does nothing to the table that it began from."""
    expected: list[dict[int, int]] = [{}]
    for edits in (first, second):
        plain = dict(expected[-1])
        for key, value in edits:
            if value is not None:
                plain[key] = value
            else:
                plain.pop(key, None)
        expected.append(plain)
    tables: list[Table[int, int]] = [Table()]
    for edits in (first, second):
        tables.append(after(tables[-1], edits))
    for table, plain in zip(tables, expected, strict=True):
        assert {key: table[key] for key in table} == plain
        assert len(table) == len(plain)
        assert table.values() == [plain[key] for key in sorted(plain)]


@given(changes)
def test_equal_content_is_equal_however_it_came(edits: list[tuple[int, int | None]]) -> None:
    """Two tables with the same entries are equal, and give their keys in the same order."""
    table = after(Table(), edits)
    other = after(Table(), [(key, table[key]) for key in reversed(list(table))])
    assert table == other
    assert list(table) == list(other)
