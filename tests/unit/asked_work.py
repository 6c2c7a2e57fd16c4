"""A verification's worker that keeps what is asked of it, for tests that answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint, RunSpec
from farm.campaign.verify.programs import RecordKey


@dataclasses.dataclass(eq=False)
class Asked:
    answer: Future[Any] = dataclasses.field(default_factory=Future, init=False)


@dataclasses.dataclass(eq=False)
class ReplayAsked(Asked):
    key: RecordKey
    trace_json: str


@dataclasses.dataclass(eq=False)
class BuildAsked(Asked):
    module_json: str
    target: Mapping[str, Any]
    standalone: bool


@dataclasses.dataclass(eq=False)
class RunAsked(Asked):
    board: str
    point: OperatingPoint
    spec: RunSpec
    program: bytes
    inputs: Mapping[str, Any]


@dataclasses.dataclass(eq=False)
class MeasureAsked(Asked):
    board: str
    point: OperatingPoint
    spec: MeasureSpec
    library: bytes


@dataclasses.dataclass(eq=False)
class ModelAsked(Asked):
    job: Callable[[], Any]
    what: str


class AskedWork:
    def __init__(self) -> None:
        self.new: list[Any] = []
        self.replay, self.build, self.compile = map(self._keep, (ReplayAsked, BuildAsked, ModelAsked))
        self.run, self.measure = map(self._keep, (RunAsked, MeasureAsked))

    def take(self) -> list[Any]:
        """What was asked since the last call, each once."""
        new, self.new = self.new, []
        return new

    def _keep(self, kind: type[Any]) -> Callable[..., Future[Any]]:
        def ask(*about: Any) -> Future[Any]:
            self.new.append(asked := kind(*about))
            return asked.answer  # type: ignore[no-any-return]

        return ask
