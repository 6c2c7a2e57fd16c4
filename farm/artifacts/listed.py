"""What a campaign's models are compiled with afterwards: one command for each, board type and operating point. Pure."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import CPU
from farm.values import DEFAULT_POINT


@dataclasses.dataclass(frozen=True)
class ToCompile:
    """One artifact: `model` as the campaign's document has it, and what it is compiled for. `name` is its folder's."""

    model: Mapping[str, Any]
    board_type: str
    point: str
    simulated: bool
    exact: bool
    device: str
    name: str

    @property
    def command(self) -> str:
        """What a user types."""
        words = ["farm", "model", "compile", str(self.model["origin"]).removeprefix("zoo:")]
        words += ["--board-type", self.board_type]
        words += ["--operating-point", self.point] if self.point != DEFAULT_POINT else []
        words += ["--batch", str(self.model["batch"])] if self.model.get("batch") is not None else []
        for shape in self.model.get("shapes", ()):
            words += ["--shape", shape]
        words += ["--simulated"] if self.simulated else []
        words += ["--exact"] if self.exact else []
        words += ["--device", self.device] if self.device != CPU else []
        return shlex.join([*words, "--out", self.name])


def list_artifacts(document: Mapping[str, Any]) -> list[ToCompile]:
    """All that a campaign's records are for, in the order of its models."""
    return [
        ToCompile(
            model,
            kind["type"],
            point,
            bool(kind["simulated"]),
            bool(document["search"].get("exact")),
            str(kind.get("device", CPU)),
            _to_name(model["name"], kind["type"], "" if len(kind["points"]) == 1 else point),
        )
        for model in document["models"]
        for kind in document["types"]
        for point in kind["points"]
    ]


def _to_name(*words: str) -> str:
    """A folder's name that no shell minds."""
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-") for word in words if word)
