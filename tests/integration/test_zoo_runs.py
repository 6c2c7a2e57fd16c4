"""What `tests/unit/test_models_zoo.py` asks of the zoo's small models, asked of those that take longer."""

from __future__ import annotations

import pytest

from farm.models import zoo
from tests.unit import test_models_zoo


@pytest.mark.parametrize("model", test_models_zoo.RUN_APART, ids=lambda m: m.name)
def test_output_is_finite_and_spread(model: zoo.ZooModel) -> None:
    """Nor is any weight constant."""
    test_models_zoo.test_output_is_finite_and_spread(model)
    test_models_zoo.test_no_weight_is_constant(model)
