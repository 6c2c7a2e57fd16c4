"""What the farm takes from inside Ray is where it looks for it; what has moved is said by name, with what breaks."""

from __future__ import annotations

import pytest
import ray

from farm.campaign.engine import ray_calls
from farm.errors import UnavailableError


def test_this_ray_has_all_parts() -> None:
    """Of the installed version; `make test-ray-floor` asks the oldest one."""
    assert ray_calls.find_moved() == []


def test_a_part_that_moved_is_said_with_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Ray 2.51, which has no tokens: what needs the part is refused by its name, and what does not goes on."""
    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    said = "ray._raylet.AuthenticationTokenLoader.instance (each Ray has a token of its own)"
    assert ray_calls.find_moved() == [said]
    with pytest.raises(UnavailableError) as refused:
        ray_calls.forget_token()
    assert said in refused.value.message
    assert ray.__version__ in refused.value.message
    with ray_calls.on_loopback(), ray_calls.own_signal_handlers():
        pass
