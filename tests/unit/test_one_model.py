"""`farm.optimize`: what it refuses before anything is started; and what commands for one model say at their end."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import farm
from farm import api, optimization
from farm.cli.model_board import _say_sent
from farm.cli.tune import _say_boards
from farm.errors import UsageError
from farm.optimization import Optimized
from farm.settings import Settings
from farm.types.campaigns import Budget


@pytest.mark.parametrize("boards", [[], ["local", "jetson-nano"]])
def test_boards_are_of_the_fleet_or_this_machine(boards: list[str], tmp_path: pathlib.Path) -> None:
    """No boards at all, and this machine beside others, cannot be tuned for."""
    with pytest.raises(UsageError, match="boards are"):
        farm.optimize("tiny-cnn", boards=boards, home=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"trials": trials}, "budget.trials: ") for trials in ("x", 0, True, 1.5)),
        ({"deadline": "soon", "objective": "energy"}, "deadline: it must be a duration"),
        ({"deadline": "33ms"}, "a deadline goes with `objective: energy` alone"),
        ({"objective": "period"}, "`objective: period` and `period: 33ms` go together"),
        ({"objective": "period", "period": "30fps", "deadline": "34ms"}, "the deadline is longer than the period"),
        ({"name": "no name/at all"}, "name: it must be up to 63 letters"),
        ({"shape": {"x": ["a"]}}, "models.0.shape.x.0: "),
        ({"batch": 0}, "models.0.batch.0: it must be at least 1"),
        ({"weights": "fp8"}, "weights: it must be"),
        ({"device": "npu"}, "device: it must be"),
        ({"objective": "beauty"}, "objective: it must be"),
    ],
)
def test_what_a_campaign_refuses_is_refused(given: dict[str, Any], said: str, tmp_path: pathlib.Path) -> None:
    """Each argument is checked as a campaign's, for this machine too, before a store is made."""
    for boards in ("local", "jetson-nano"):
        with pytest.raises(UsageError) as caught:
            farm.optimize("tiny-cnn", boards=boards, home=tmp_path, **given)
        assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_this_machine_takes_what_a_fleet_takes(tmp_path: pathlib.Path) -> None:
    """Here, a GPU or an energy that this machine has not is refused as by `farm tune`, once the work begins."""
    one = farm.optimize("tiny-cnn", trials=3, objective="energy", deadline=0.033, home=tmp_path, name="mine")
    assert repr(one) == "<farm.Optimization of tiny-cnn for local: 3 trials>"
    with pytest.raises(UsageError, match="is not known to have a power sensor"):
        one.wait()
    with pytest.raises(UsageError, match="GPU"):
        farm.optimize("tiny-cnn", device="gpu", home=tmp_path).wait()
    with pytest.raises(UsageError, match="changes a dimension that the model fixes"):
        farm.optimize("tiny-cnn", shape={"data": (1, 3, 8, 8)}, home=tmp_path).wait()
    farm.Campaign(name="c", models="efficientnet-lite0", boards="jetson-nano", budget=1, home=tmp_path)
    made = Optimized({"models": [{"name": "m"}], "types": [{"type": "local"}]}, Settings(), print)
    assert repr(made) == "<farm.Optimized m for local>"


def test_progress_is_told_now_and_then() -> None:
    """`wait` says how far it is every ten seconds, and the end at once."""
    said: list[str] = []
    listener = optimization._Listener(said.append)
    progress = {"counted": 3, "tasks": [], "boards": [], "eta_s": 60.0}
    listener.print_progress("m", "running", "", Budget(trials=8), progress)
    assert said == []
    listener._printed_at -= 11.0
    listener.print_progress("m", "running", "", Budget(trials=8), progress)
    listener.print_progress("m", "running", "", Budget(trials=8), progress)
    assert len(said) == 1
    assert "3/8" in said[0]


def test_the_phase_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While winners are measured on boards of a fleet, `wait` says so."""
    monkeypatch.setattr(optimization, "_TELL_S", 0.0)

    class Waited:
        name = "m"

        def wait(self, timeout_s: float | None, on_progress: Any) -> dict[str, Any]:
            on_progress({"phase": "verifying", "counted": 8, "winners": {"measured": 3, "at_most": 9}})
            return {}

    said: list[str] = []
    one = optimization.Optimization(
        api.Campaign(name="m", models="mlp", boards="tx2", budget=8, home=tmp_path), said.append
    )
    one.campaign = Waited()  # type: ignore[assignment]
    one.wait()
    assert len(said) == 1
    assert said[0].startswith("m is verifying | trials 8/8 |")


def test_several_board_types_are_several_packages(tmp_path: pathlib.Path) -> None:
    """One path cannot take two wheels."""
    optimized = Optimized({"models": [], "types": [{}, {}]}, Settings(home=str(tmp_path)), print)
    with pytest.raises(UsageError, match="several packages") as caught:
        optimized.save_package(tmp_path / "out.whl")
    assert "save_packages" in caught.value.hint


class Packed(Optimized):
    def save_packages(self, folder: str | pathlib.Path) -> list[pathlib.Path]:
        wheel = pathlib.Path(folder) / "model-1.0-py3-none-any.whl"
        wheel.parent.mkdir(exist_ok=True)
        wheel.write_bytes(b"wheel")
        return [wheel]


def test_a_wheel_has_the_name_that_was_asked_for_and_its_own(tmp_path: pathlib.Path) -> None:
    """Pip installs the one, scripts find the other; a user's file under that name stays."""
    said: list[str] = []
    packed = Packed({"models": [], "types": [{}]}, Settings(home=str(tmp_path)), said.append)
    for _ in range(2):
        wheel = packed.save_package(tmp_path / "model.whl")
        assert wheel.name == "model-1.0-py3-none-any.whl"
        assert (tmp_path / "model.whl").resolve() == wheel
    assert "is a link to model-1.0-py3-none-any.whl" in said[0]
    assert packed.save_package(tmp_path / "dist") == tmp_path / "dist" / wheel.name
    (tmp_path / "mine.whl").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        packed.save_package(tmp_path / "mine.whl")
    with pytest.raises(UsageError, match="nothing can be written"):
        packed.save_package(tmp_path / "mine.whl" / "dist")


def test_boards_and_bytes_are_all_told() -> None:
    """A tuning names every board that measured, a deployment never says 0.0 MB."""
    six = [{"name": f"n{at}", "trials": 9 - at} for at in range(1, 8)]
    used = {"name": "n1", "type": "jetson-nano", "simulated": True}
    told = _say_boards({"board": used, "boards": six})
    assert told.startswith("measured on 7 boards of type jetson-nano: n1 (8 trials), n2 (7 trials), ")
    assert "n6 (3 trials) and 1 more, which are simulated" in told
    assert _say_boards({"board": used, "boards": six[:1]}).startswith("measured on jetson-nano/n1, which is simulated")
    assert [_say_sent(41_234, sent) for sent in (None, 41_234, 512, 0)] == [
        "41.2 kB",
        "41.2 kB sent",
        "41.2 kB, of which 512 bytes sent",
        "41.2 kB, there already",
    ]
