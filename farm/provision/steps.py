"""The steps of a board's provisioning as they are taken: timed, reported, ended by an interruption."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from farm.errors import FarmError
from farm.provision.plan import ProvisioningPlan, StepReport, StepStatus

Result = TypeVar("Result")


class Interrupted(Exception):
    """The work on a board was interrupted from outside."""


class StepRunner:
    """Takes steps until `_stop` is set; `_steps` has their reports."""

    def __init__(self, show: Callable[[StepReport], None]) -> None:
        """`show` gets each finished step."""
        self._show = show
        self._steps: list[StepReport] = []
        self._stop = threading.Event()

    def _change(self, plan: ProvisioningPlan, name: str, work: Callable[[], str]) -> None:
        """Run a step if it is in the plan."""
        if name in plan.needed:
            self._step(name, lambda: (None, StepStatus.DONE, work()))
        else:
            self._note_step(name, StepStatus.ALREADY, "")

    def _step(self, name: str, work: Callable[[], tuple[Result, StepStatus, str]]) -> Result:
        if self._stop.is_set():
            raise Interrupted
        return self._timed(name, work)

    def _timed(self, name: str, work: Callable[[], tuple[Result, StepStatus, str]]) -> Result:
        began = time.monotonic()
        try:
            result, status, detail = work()
        except FarmError as error:
            if self._stop.is_set():
                self._note_step(name, StepStatus.FAILED, "interrupted", time.monotonic() - began)
                raise Interrupted from error
            self._note_step(name, StepStatus.FAILED, str(error), time.monotonic() - began)
            raise
        self._note_step(name, status, detail, time.monotonic() - began)
        return result

    def _note_step(self, name: str, status: StepStatus, detail: str, seconds: float = 0.0) -> None:
        report = StepReport(name, status, detail, seconds)
        self._steps.append(report)
        self._show(report)
