"""Names of graph pipelines and what they stand for."""

from __future__ import annotations

import pytest

from farm.errors import UsageError
from farm.inventory.board_types import load_board_types
from farm.search.graph import pipelines
from farm.values import read_pipeline


def test_a_name_says_what_a_pipeline_is() -> None:
    """The exact pipeline differs in nothing but Winograd's larger tiles and polynomials; what has neither is exact.
    Whether it is exact, and how it stores weights, is read from names alone, of an unknown one nothing. The error lists
    the known ones.
    """
    plain, exact = (pipelines.require_pipeline(name) for name in ("graph/2", pipelines.exact("graph/2")))
    assert (exact.winograd, exact.polynomials) == ("exact", False)
    assert (exact.layout, exact.prepack, exact.canonical) == (plain.layout, plain.prepack, plain.canonical)
    assert pipelines.exact("graph/2-nchw") == "graph/2-nchw"
    for name, each in pipelines.PIPELINES.items():
        exact, weights = read_pipeline(name)
        assert (exact, weights or "float32") == (each.winograd == "exact", each.weights)
    assert read_pipeline("graph/9-odd") == (False, None)
    with pytest.raises(UsageError, match="graph/2-exact"):
        pipelines.require_pipeline("graph/9")


def test_board_types_name_pipelines() -> None:
    """A misspelt name would stop the first command that tunes."""
    for kind in load_board_types().values():
        assert pipelines.require_pipeline(kind.pipeline).canonical
