"""Whether sections of a board type's file agree with themselves, which an agent takes on trust.

What they hold is declared for both in `device_agent/protocol/hardware.py`; whether they agree with each other is
checked in `board_types.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Annotated, TypeVar

import pydantic

from device_agent.protocol.hardware import Power, Thermal

Item = TypeVar("Item", bound=Hashable)
# What is linked for, as Zig says it.
LinkTriple = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9_]+-linux-[a-z]+(\.\d+)*$")]


def find_repeated(items: Iterable[Item]) -> Item | None:
    """The first item that occurs a second time."""
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _totals_are_rails(power: Power) -> Power:
    rails = [rail for chip in power.chips for rail in chip.rails if rail]
    if twice := find_repeated(rails):
        raise ValueError(f"the rail {twice} is connected twice")
    if twice := find_repeated(chip.address for chip in power.chips):
        raise ValueError(f"two chips have the address {twice}")
    if twice := find_repeated(power.total + power.board_total):
        raise ValueError(f"{twice} would be added to the total twice")
    if missing := [rail for rail in power.total + power.board_total if rail not in rails]:
        raise ValueError(f"no chip has the total's rail {missing[0]}; rails: {', '.join(rails) or 'none'}")
    fitted = {rail for chip in power.chips if chip.fitted for rail in chip.rails}
    if missing := [rail for rail in power.total if rail not in fitted]:
        raise ValueError(f"the total's rail {missing[0]} is on a chip that is not fitted everywhere")
    if bool(power.total) != bool(power.total_scope):
        raise ValueError("total and total_scope must both be given, or neither: a sum means nothing without scope")
    return power


def _ignored_exist(thermal: Thermal) -> Thermal:
    if twice := find_repeated(thermal.zones):
        raise ValueError(f"the zone {twice} is listed twice")
    if missing := [zone for zone in thermal.ignore if zone not in thermal.zones]:
        raise ValueError(f"ignore names {missing[0]}, which is not among the zones")
    return thermal


CheckedPower = Annotated[Power, pydantic.AfterValidator(_totals_are_rails)]
CheckedThermal = Annotated[Thermal, pydantic.AfterValidator(_ignored_exist)]
