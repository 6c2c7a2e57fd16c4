"""A sweep of any program: runs in terms of the objective, limits on other metrics, and how figures are shown."""

from __future__ import annotations

import dataclasses
import pathlib
import platform

import numpy as np
import pytest

from device_agent.protocol import Energy, Engine, Outcome, PowerWindow, RailPower, RunDetails, Status
from farm.cli import sweep as commands
from farm.cli import sweep_report
from farm.crew import visits
from farm.errors import UsageError
from farm.inventory.board_types import require_board_type
from farm.points.values import Goal
from farm.programs.metrics import Limit, ProgramMetric
from farm.programs.order import ProgramOrder
from farm.report.sweep_page import write_csv, write_page
from farm.store import Store
from farm.sweep import stored
from farm.sweep.export.chosen import ExportForm
from farm.sweep.export.document import make_document
from farm.sweep.plan.order import SweepOrder, SweepPlace, preview
from farm.sweep.run.programs import list_programs
from tests.unit.test_sweep_goal import FAST, GRID, SLOW

METRICS = ("decode=[0].ts, more, tok/s", "ttft=[0].first, less, ms")
PROGRAM = ProgramOrder("/bin/llm -t {n}", metrics=METRICS, vary=("n=1,2",))
GOAL = Goal(deadline_s=0.1, metric=ProgramMetric.parse(METRICS[0]), limits=(Limit("ttft", 300.0, "ms"),))
ORDER = SweepOrder(PROGRAM.name, variants=tuple(PROGRAM.list_settings()), exhaustive=True, program=PROGRAM)


def run(rate: float, ttft: float, watts: float) -> tuple[Outcome, dict[str, np.ndarray]]:
    """Five runs of 2 s."""
    total = RailPower("IN", watts, (0.99 * watts, 1.01 * watts), 10 * watts, (9.9 * watts, 10.1 * watts), 50, 50)
    busy = PowerWindow(0.0, 10.0, (total,), total, "IN", 5, enough=True)
    energy = Energy(busy, None, 2 * watts, (1.98 * watts, 2.02 * watts))
    text = f'[{{"ts": {rate}, "first": {ttft}}}]'.encode()
    outputs = {f"out_{index:03}": np.frombuffer(b"" if index % 2 else text, np.uint8) for index in range(10)}
    return Outcome(Status.OK, latency_s=(2.0,) * 5, energy=energy, details=RunDetails(None)), outputs


@pytest.fixture
def store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A sweep whose slow point needs the least energy, and whose fast one alone keeps the limit on ttft."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    store = Store(tmp_path / "farm.db")
    kept = {"goal": stored.goal_to_dict(GOAL), "grid": stored.grid_to_dict(GRID), "settings": {}}
    about = {"model": PROGRAM.name, "model_sha256": "", "board_type": "jetson-nano", "simulated": True}
    sweep = store.sweeps.start(command="sweep run", request=dataclasses.asdict(ORDER), **about, **kept)  # type: ignore[misc]
    for series in list_programs(PROGRAM, "cpu"):
        for number, (key, ran) in enumerate(((SLOW, run(20.0, 400.0, 2.0)), (FAST, run(40.0, 200.0, 8.0)))):
            found, medians = series.read(*ran)
            measured = visits.to_measurement(found, key, float(number), "n-1", needs_total=True)
            visit = stored.measurement_to_dict(series.convert(measured, medians))
            names = {"variant": series.variant, "batch": 1, "key": key, "visit": number, "board": "n-1"}
            store.sweeps.add_point(sweep, measurement=visit, outcome=found.to_dict(), **names)  # type: ignore[misc]
    store.sweeps.finish(sweep, "finished", {})
    return store


def test_a_run_is_in_terms_of_its_objective() -> None:
    """A rate is fitted as its reciprocal, and energy is for each thing counted; of a run's time, for a run."""
    [timed], [first, second] = list_programs(ProgramOrder("/bin/llm"), "cpu"), list_programs(PROGRAM, "gpu")
    spec = first.fit(visits.plan_visit(visits.Window(5.0), 2.0, 4, 1))
    assert (spec.engine, spec.device, spec.return_outputs) == (Engine.PROGRAM, "gpu", True)
    assert (second.command.arguments, second.variant) == (("/bin/llm", "-t", "2"), "n=2")
    for program, latency_s, energy_j in ((first, 0.05, 0.2), (timed, 2.0, 8.0)):
        outcome, medians = program.read(*run(20.0, 400.0, 4.0))
        assert outcome.latency_s == (latency_s,) * 5
        visit = program.convert(visits.to_measurement(outcome, "k", 0.0, "b"), medians)
        assert visit.energy.value == pytest.approx(energy_j)
    assert first.read(*run(20.0, 400.0, 4.0))[1] == {"time": 2.0, "decode": 20.0, "ttft": 400.0}
    assert first.read(Outcome(Status.NOISY), {}) == (Outcome(Status.NOISY), {})


def test_a_pick_keeps_limits_on_other_metrics(store: Store) -> None:
    """The thriftiest point is too late with its first token; where none is in time, the nearest is named."""
    with store:
        late, [free, _] = (
            make_document(store, 1, dataclasses.replace(GOAL, limits=limits))["series"]
            for limits in ((Limit("ttft", 0.1, "ms"),), ())
        )
        assert [each["pick"]["key"] for each in make_document(store, 1)["series"]] == [FAST, FAST]
    assert free["pick"]["key"] == SLOW
    assert "a ttft of at most 0.1 ms with its whole interval; the fastest takes 40.0 tok/s" in late[0]["no_pick"]


def test_a_rate_is_shown_as_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, export, CSV and page have tok/s, J per tok, the other metrics and the command."""
    with store:
        document = make_document(store, 1)
    sweep_report.print_sweep(document)
    commands.pick(1, objective="latency")
    sweep_report.export(1, ExportForm.SH, variant="n=2")
    said = capsys.readouterr().out + write_csv(document) + write_page(document, [])
    for text in (
        *("/bin/llm -t {n}", "decode (tok/s)", "ttft (ms)", "time (s)", "tok/J", "decode 40.0 tok/s, 8 W, 200 ±"),
        *("the least energy per tok, with a decode of at least 10.0 tok/s and a ttft of at most 300 ms",),
        *("the highest decode", "#   decode 40", "energy per tok 200", "metric_decode,metric_ttft", "20.0,400.0,2.0"),
        *("decode, tok/s", "ttft, ms", "The decode then is 40", "mJ per tok", "tok per J"),
    ):
        assert text in said, text


def test_what_cannot_be_swept_is_refused_before(tmp_path: pathlib.Path) -> None:
    """Files for another processor, and options of models with a program; the order survives the store."""
    assert SweepOrder.from_dict(dataclasses.asdict(ORDER)) == ORDER
    asked = commands.Asked(program="/bin/llm", metric=list(METRICS), at_least=["decode=10"], deadline="1s")
    assert asked.read_goal()[0] == dataclasses.replace(GOAL, deadline_s=pytest.approx(0.1), limits=())
    both, models = (asked, "tiny-cnn"), (dataclasses.replace(asked, batch="1,4"), "")
    for wrong, model in (both, models, (commands.Asked(at_least=["a=1"]), "tiny-cnn"), (commands.Asked(), "")):
        with pytest.raises(UsageError):
            wrong.read_order(model)
    other = 62 if platform.machine() == "aarch64" else 183
    (tmp_path / "app").write_bytes(b"\x7fELF\x02\x01" + bytes(12) + other.to_bytes(2, "little"))
    order = SweepOrder("app", program=ProgramOrder("app", (str(tmp_path / "app"),)))
    with pytest.raises(UsageError, match="app is for "):
        preview(order, SweepPlace("local"), require_board_type("local"), Goal(), False, [])
