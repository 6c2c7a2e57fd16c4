"""The programs that a verification works with, shared by all operating points of a workload on a board type.

A candidate is replayed, built, run once on a board and compared with the unscheduled function, which went the same way.
Both get equal seeded inputs, and are built so that each computes the right thing from ordinary weights.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from device_agent.protocol import FaultSide, Outcome, Status, TensorSpec
from farm.artifacts.verify import compare
from farm.campaign.verify.checks import OutError, Program
from farm.campaign.verify.requests import BuildWanted, Outbox, Place, ReplayWanted, WinnerKey
from farm.crew.coroutines import Loop, Promise, Running, until
from farm.errors import InternalError
from farm.measure.arguments import read_arguments
from farm.measure.arrays import Arrays
from farm.values import UNTUNED


@dataclasses.dataclass(eq=False)
class CheckWanted(Promise[tuple[Outcome, Arrays]]):
    """A program, built for it, that a board should run once; `is_begun`: one does."""

    program: Program
    binary: bytes = dataclasses.field(repr=False)
    is_begun: bool = False


class Programs:
    """Made when they are first asked for; held until nobody needs them. They are large: libraries and outputs."""

    def __init__(
        self,
        loop: Loop,
        outbox: Outbox,
        workloads: Mapping[Place, Mapping[str, Any]],
        find_target: Callable[[Program], Mapping[str, Any]],
        note_retry: Callable[[Program, FaultSide, str], None],
    ) -> None:
        """`workloads` are rows of the store. `note_retry` gets each failure after which a program is tried again."""
        self._note_retry = note_retry
        self._loop, self._outbox, self._workloads, self._find_target = loop, outbox, workloads, find_target
        self._programs: dict[tuple[str, str, str | None], tuple[Program, Running]] = {}
        self._checks: list[CheckWanted] = []

    def find(self, key: WinnerKey, candidate: str | None, trace_json: str = "") -> Program:
        """The program of a candidate; None: of the unscheduled function. It is prepared from now on."""
        name = (*key.place, candidate)
        if name not in self._programs:
            about = self._workloads[key.place]
            program = Program(key, candidate, trace_json)
            if candidate == UNTUNED:
                program.arguments = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in about["arguments"])
            reference = program if candidate is None else self.find(key, None)
            self._programs[name] = program, self._loop.start(self._prepare(program, reference))
        return self._programs[name][0]

    def find_check(self, place: Place) -> CheckWanted | None:
        """One that a board may begin now."""
        return next((each for each in self._checks if each.program.key.place == place and not each.is_begun), None)

    def count_checks(self, places: Collection[Place]) -> Counter[str]:
        """By board type, how many of those needed now are made or could be."""
        return Counter(each.program.key.board_type for each in self._checks if each.program.key.place in places)

    def drop(self, place: Place) -> None:
        """Nobody needs those of a workload any more. Answers that come all the same change nothing."""
        for name in [name for name in self._programs if name[:2] == place]:
            self._programs.pop(name)[1].close()

    async def _prepare(self, program: Program, reference: Program) -> None:
        """What happens to a program, until it may be timed or is out. What fails by chance is tried again."""
        try:
            if program is reference:
                module_json = str(self._workloads[program.key.place]["module_json"])
            else:
                module_json = await self._replay(program)
            binary = await self._build(program, module_json)
            await until(lambda: program is reference or reference.outputs is not None)
            outcome, outputs = await self._run(program, binary)
            if program is reference:
                program.outputs = list(outputs.values())
                program.latency_s = statistics.median(outcome.latency_s) if outcome.latency_s else None
                return
            program.comparison = compare(list(outputs.values()), reference.outputs or [])
            if not program.comparison.matches:
                program.give_up(Status.WRONG_RESULT, program.comparison.reason)
        except OutError:
            return

    async def _replay(self, program: Program) -> str:
        """Its scheduled function, in TVM's JSON."""
        if program.trace_json:  # untuned code has none, and takes what its workload takes
            try:
                program.arguments = read_arguments(program.trace_json)
            except InternalError as error:
                program.give_up(None, error.message)
        while True:
            found = await self._outbox.ask(ReplayWanted(program.key, program.trace_json))
            if found.module_json is not None:
                return found.module_json
            if not found.lost:  # not the candidate's fault: it ran once
                program.give_up(None, f"its trace cannot be replayed: {found.reason}")
            self._retry(program, Status.FARM_ERROR, found.reason)

    async def _build(self, program: Program, module_json: str) -> bytes:
        """Compile it for its check, which is returned, and a candidate beside that for being timed.

        For timing, packed weights are taken as packed.
        """
        target = self._find_target(program)
        built: dict[bool, bytes] = {}
        while missing := {True, program.candidate is None} - built.keys():
            asked = {alone: self._outbox.ask(BuildWanted(module_json, target, alone)) for alone in sorted(missing)}
            for standalone, request in asked.items():
                result = await request
                if result.status is not Status.OK or result.library is None:
                    self._retry(program, result.status, result.message, lost=result.died)
                    continue
                built[standalone] = result.library
                if not standalone:
                    program.library, program.sha256, program.build_s = result.library, result.sha256, result.seconds
        return built[True]

    async def _run(self, program: Program, binary: bytes) -> tuple[Outcome, Arrays]:
        """Have a board run it; which one, and when, is for `winners` to say."""
        while True:
            check = CheckWanted(program, binary)
            self._checks.append(check)
            try:
                outcome, outputs = await check
            finally:
                self._checks.remove(check)
            if outcome.status is Status.OK:
                return outcome, outputs
            self._retry(program, outcome.status, outcome.message, lost=outcome.status is Status.BOARD_LOST)

    def _retry(self, program: Program, status: Status, message: str, *, lost: bool = False) -> None:
        """Note a failure after which a program is tried again. Raises OutError where it is out instead."""
        side = program.judge(status, message, lost=lost)
        self._note_retry(program, side, f"{status}: {message}")
