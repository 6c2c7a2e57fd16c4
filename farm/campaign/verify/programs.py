"""The programs that a verification works with, shared by all operating points of a workload on a board type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from device_agent.protocol import TensorSpec
from farm.campaign.verify.checks import Program, What
from farm.campaign.verify.requests import WinnerKey
from farm.values import UNTUNED

# Board type and workload.
Place = tuple[str, str]


class Programs:
    """Made when they are first asked for; held until nobody needs them. They are large: libraries and outputs."""

    def __init__(self, workloads: Mapping[Place, Mapping[str, Any]]) -> None:
        """`workloads` are rows of the store."""
        self._workloads = workloads
        self._programs: dict[tuple[str, str, str | None], Program] = {}

    def find(self, key: WinnerKey, candidate: str | None, trace_json: str = "") -> Program:
        """The program of a candidate; None: of the unscheduled function."""
        name = (key.board_type, key.workload, candidate)
        if name not in self._programs:
            about = self._workloads[key.board_type, key.workload]
            module_json = about["module_json"] if candidate is None else None
            program = Program(key.board_type, key.workload, candidate, trace_json, module_json)
            if candidate == UNTUNED:
                program.arguments = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in about["arguments"])
            self._programs[name] = program
        return self._programs[name]

    def find_reference(self, program: Program) -> Program:
        """What a program's output is compared with."""
        return self._programs.get((*program.place, None), program)

    def plan(self, places: Collection[Place]) -> list[tuple[Program, What]]:
        """What can be done now without a board for those that are needed now."""
        return [
            (program, what) for program in self._programs.values() if program.place in places for what in program.plan()
        ]

    def find_runnable(self, place: Place) -> Program | None:
        """One that a board may check now."""
        for program in self._programs.values():
            if program.place == place and program.can_run(self.find_reference(program)):
                return program
        return None

    def count_runs(self, places: Collection[Place]) -> Counter[str]:
        """By board type, how many of those needed now are being checked or could be."""
        return Counter(
            program.board_type
            for program in self._programs.values()
            if program.place in places and ("run" in program.asked or program.can_run(self.find_reference(program)))
        )

    def drop(self, place: Place) -> None:
        """Nobody needs those of a workload any more. Answers that come all the same change nothing."""
        self._programs = {name: program for name, program in self._programs.items() if program.place != place}
