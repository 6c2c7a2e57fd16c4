"""One measurement from the session's side: conditions before it, what runs beside it, what it comes to.

Running the worker is in `worker.py`; the rules by which samples are believed are in `validity.py`.
"""

from __future__ import annotations

import dataclasses

from device_agent import start, validity
from device_agent.board import Board
from device_agent.errors import BadPointError
from device_agent.observe import Observer
from device_agent.plan import Plan
from device_agent.protocol import MeasureSpec, Outcome, RunSpec, StartConditions, Status


class Measurement:
    """Everything around one worker. `refusal` is the outcome where it may not start at all."""

    def __init__(self, board: Board, spec: MeasureSpec | RunSpec, content: tuple[bytes, ...]) -> None:
        """Wait for the start conditions and lay out the plan. Never raises for what the board lacks.

        `content` is what came beside `spec`.
        """
        self._board = board
        self._spec = spec
        self._content = content
        self._observer = Observer(board.power, board.sensor_infos, board.time)
        self.beside = self._observer.beside
        self.refusal = self._find_refusal()
        self.plan = Plan(board.evidence, board.marks)
        if self.refusal is None:
            self._lay_out()

    def _find_refusal(self) -> Outcome | None:
        if reason := self._board.unsafe():
            return Outcome(Status.CLOCK_DRIFTED, f"the board is unsafe: {reason}")
        if moved := self._board.reassert():
            return Outcome(Status.CLOCK_DRIFTED, f"the operating point does not hold: {moved}")
        if self._spec.start is not None and (problem := self._wait_for_start(self._spec.start)):
            return Outcome(Status.NOISY, problem)
        return None

    def _wait_for_start(self, conditions: StartConditions) -> str:
        time = self._board.time
        return start.wait(conditions, self._board.evidence, time.now_s, time.sleep)

    def _lay_out(self) -> None:
        try:
            cpus = self._board.place(self._spec.limits.cluster)
        except BadPointError as error:
            self.refusal = Outcome(Status.FARM_ERROR, str(error))
            return
        self.plan.time = self._board.time.own()
        if not self._board.tree.simulated:
            self.plan.cpus = cpus
        if self._spec.energy is not None:
            windows = self._observer.plan_window(self._spec.energy)
            self.plan.idle_s, self.plan.busy_s, self.plan.margin_s = windows
        limit_s = self._spec.limits.timeout_s + self.plan.extra_s
        self.plan.emulator = self._board.find_emulator(self._spec, self._content[0])
        self.plan.pace = self._board.pace(self._spec, self._content, self.plan.time, limit_s)

    def finish(self, outcome: Outcome) -> Outcome:
        """The outcome with power, energy and the board's name, judged by its own evidence."""
        phases = self._board.marks.read()
        if outcome.status is Status.OK and outcome.before is not None and outcome.after is not None:
            window_s = max(phases.timing_end_s, phases.busy_end_s) - phases.timing_start_s
            load = None
            if not self._board.tree.simulated:  # a virtual board's CPU time is the host's
                load = validity.other_load(outcome.before, outcome.after, window_s, phases.cpu_s)
            outcome = dataclasses.replace(
                outcome,
                other_load=load,
                power=self._observer.read_power(phases),
                energy=self._observer.read_energy(phases, self._spec.energy) if self._spec.energy else None,
            )
        outcome = dataclasses.replace(outcome, point=self._board.point)
        return self._board.sign(validity.judge(outcome, self._board.pinned_hz(), self._spec.max_spread))
