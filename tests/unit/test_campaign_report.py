"""The report of a campaign: latencies of models from trials, what was gained, and what is written and drawn."""

from __future__ import annotations

import json
import pathlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from device_agent.protocol import OperatingPoint
from farm.artifacts import artifact_folder
from farm.report import campaign_document, campaign_rows, campaign_words, pages
from farm.report.campaign_words import write_campaign_report
from farm.store import Store
from farm.store.totals import CountedTrial
from farm.types.campaigns import ModelOrder, WorkloadOrder
from tests.unit.campaign_documents import PLACES, make_document
from tests.unit.campaign_orders import make_order, make_type, submit


def write_page(document: dict[str, Any], gains: Sequence[campaign_rows.Gain]) -> str:
    """The report's page in Markdown, without pictures."""
    return pages.write_markdown(campaign_words.write_page(document, gains), [])


def test_a_models_latency_starts_when_all_is_known() -> None:
    """A step is every trial that makes the sum over a model's workloads better, weighted by its own calls."""
    workloads = (
        WorkloadOrder(hash="a", name="a", kind="dense", flop=1e6, weight=3, models=("m", "n"), calls=(2, 1)),
        WorkloadOrder(hash="b", name="b", kind="dense", flop=1e6, weight=4, models=("m",), calls=(4,)),
    )
    models = tuple(ModelOrder(name=name, origin="zoo", sha256="", batch=None) for name in "mno")
    of_type = make_type("t", workloads).model_copy(update={"points": {"p": OperatingPoint()}})
    order = make_order(models=models, types=(of_type,))
    course = [
        CountedTrial("t", workload, "p", median_s)
        for workload, median_s in [("a", 5.0), ("b", None), ("a", 3.0), ("b", 2.0), ("a", 4.0), ("b", 1.0)]
    ]
    m, n = campaign_document.draw_curves(order, campaign_document.list_gains(course))
    assert (m["model"], m["steps"]) == ("m", [[4, 14.0], [6, 10.0]])
    assert (n["model"], n["steps"]) == ("n", [[1, 5.0], [3, 3.0]])
    assert m["calls"] == {"a": 2.0, "b": 4.0}


def test_gains_are_those_of_the_model_itself() -> None:
    """The gain compares the model's own times with those of untuned code, also if it is nothing."""
    document = make_document(places=PLACES[:1])
    gained, nothing, _ = campaign_rows.list_gains(document)
    assert (gained.model, gained.predicted_s, gained.last_s) == ("resnet18", 0.0131, 0.0122)
    assert gained.factor == pytest.approx(0.0131 / 0.0122)
    assert (nothing.factor, nothing.last_s) == (1.0, 0.0131)
    page = write_page(document, [gained, nothing])
    assert (
        "- **resnet18 takes 12.2 ms on jetson-nano @ default**: 1.07 times as fast as the untuned prediction." in page
    )
    assert "Tuning found no speedup: with its records the model takes 1.03 times as long" in page
    assert "first schedules" not in page
    document["progress"]["verdict"]["finals"][0]["doubt"] = "the board was too busy: the load average was 9.0"
    gains = campaign_rows.list_gains(document)
    assert gains[0].factor is None
    doubted = write_page(document, gains)
    assert "the load average was 9.0" in doubted
    assert "takes 12.2 ms" not in doubted
    assert "| resnet18 | jetson-nano | default | 12.2 ms | 12.4 ms | 15.3 ms | 31.1 ms | 190 MB | 48.2 MB |" in page
    assert "- workloads on jetson-nano @ default, 1 thread, a57=1479MHz\n" in page
    assert "- resnet18 on jetson-nano/nano-1 @ default: 4 threads, a57=1479MHz; 60 timed runs\n" in page


def test_a_model_that_was_not_timed_has_no_gain() -> None:
    """What it takes is then the sum of its records; where one is missing, the best trial is taken, and that is said."""
    document = make_document()
    number = next(at for at, each in enumerate(document["curves"]) if each["model"] == "mlp")
    curve = document["curves"][number]
    whole = campaign_rows.list_gains(document)[number]
    assert (whole.verified, whole.factor) == (True, None)
    assert whole.last_s == pytest.approx(curve["steps"][-1][1])
    missing = next(each for each in document["winners"] if each["workload"] in curve["calls"])
    missing["median_s"] = None
    gain = campaign_rows.list_gains(document)[number]
    assert (gain.verified, gain.recorded, gain.tried, gain.guessed) == (False, whole.workloads - 1, 1, 0)
    assert f"({gain.workloads} workloads: 1 from one trial)" in write_page(document, [gain])


def test_what_no_trial_speaks_of_is_predicted_and_marked() -> None:
    """A workload with neither a record nor a good trial is in the sum by prediction; without one there is no sum."""
    document = make_document()
    number = next(at for at, each in enumerate(document["curves"]) if each["model"] == "mlp")
    curve = document["curves"][number]
    place = (curve["board_type"], curve["point"])
    missing = next(
        each
        for each in document["winners"]
        if each["workload"] in curve["calls"] and (each["board_type"], each["point"]) == place
    )
    recorded = campaign_rows.list_gains(document)[number].last_s
    median_s, missing["median_s"], curve["best_s"] = missing["median_s"], None, {}
    assert campaign_rows.list_gains(document)[number].last_s is None
    missing["predicted_s"] = median_s + 1.0
    gain = campaign_rows.list_gains(document)[number]
    assert gain.last_s == pytest.approx(recorded + curve["calls"][missing["workload"]])
    assert (gain.tried, gain.guessed) == (0, 1)
    assert f"({gain.workloads} workloads: 1 predicted)" in write_page(document, [gain])


def test_what_has_no_winner_is_said() -> None:
    """A task without a record is listed by name with the reason that the engine gave, and boards that disagree are."""
    document = make_document(places=PLACES[:1])
    first, second, *_ = document["winners"]
    first |= {"median_s": None, "evidence": None}
    document["progress"]["verdict"]["undecided"] = [
        {"board_type": second["board_type"], "workload": second["workload"], "point": second["point"]}
        | {"reason": "no board was left"}
    ]
    page = write_page(document, campaign_rows.list_gains(document))
    assert f"No winner:\n- {first['name']} on jetson-nano @ default\n- {second['name']} on" in page
    assert ": no board was left" in page
    assert "Boards contradict each other:\n- nano-1 and nano-2 do not agree" in page


def test_the_report_is_written(tmp_path: pathlib.Path) -> None:
    """A page with its pictures and tables, and the whole as JSON."""
    document = make_document(places=(PLACES[0], PLACES[2]))
    notes: list[str] = []
    paths = write_campaign_report(document, tmp_path / "one", notes.append)
    assert (notes[0], len(notes)) == ("drawing gains (1 of 4)", 4)
    assert {pathlib.Path(each).name for each in paths.values()} == {
        *("report.html", "report.md", "report.json", "gains.png", "course.png", "winners.png", "boards.png")
    }
    assert json.loads(pathlib.Path(paths["json"]).read_text()) == json.loads(json.dumps(document))
    page = pathlib.Path(paths["markdown"]).read_text()
    for text in (
        "> **Simulated.** All boards are models of hardware",
        "The campaign is finished: 900 trials are spent. 900 trials counted in 3:20:00 on 6 boards",
        "## Winners",
        "| nano-2 | jetson-nano | 220 | 180 | 24 | 7 | 9 | 0 | 42:00 |",
        "240 of them measured the best candidates again",
        f"- {document['winners'][0]['name']} on jetson-nano at default: the search begins with 412 trials of other",
        "- labels: site=lab",
        "| conv2d 3x3 8x8x8>8 | 0.91 | 0.89 | 1.03 | taken |",
    ):
        assert text in page
    html = pathlib.Path(paths["page"]).read_text()
    assert '<p class="simulated">Simulated: All boards are models of hardware' in html
    assert html.count('src="data:image/svg+xml;base64,') == 4
    assert not re.search(r'(?:src|href)="(?!data:|report\.)', html)
    for name in ("gains", "course", "winners", "boards"):
        assert f"]({name}.png)" in page
        width, height = struct.unpack(">II", pathlib.Path(paths[name]).read_bytes()[16:24])
        assert width == 1680
        assert 500 < height < 4000


def test_a_campaign_that_has_not_begun_has_a_report_too(tmp_path: pathlib.Path) -> None:
    """What is not known is left out: no pictures, no winners, and still what was ordered."""
    with Store(tmp_path / "farm.db") as store:
        submit(store, make_order("c"))
        document = campaign_document.make_document(store, "c")
    paths = write_campaign_report(document, tmp_path / "report")
    assert set(paths) == {"page", "markdown", "json"}
    page = pathlib.Path(paths["markdown"]).read_text()
    assert "The campaign is submitted" in page
    assert "0 of 2 tasks have a record" in page
    assert "mlp | zoo:mlp | abababababab" in page


def test_every_model_has_a_command_that_compiles_it() -> None:
    """The page names one for each model, board type and point, as it is typed: points and odd paths in quotes."""
    document = make_document() | {
        "models": [
            {"name": "my net batch 4", "origin": "/data/my net.onnx", "sha256": "", "batch": 4, "shapes": ["x=4,3"]}
        ],
        "types": [
            {"type": "jetson-nano", "simulated": True, "points": ["default", "cores=0-3 a57=921.6MHz"], "workloads": 1}
            | {"pipeline": "graph/2"}
        ],
    }
    first, second = (each.command for each in artifact_folder.list_artifacts(document))
    assert first == (
        "farm model compile '/data/my net.onnx' --board-type jetson-nano --batch 4 --shape x=4,3 --simulated "
        "--out my-net-batch-4-jetson-nano-default"
    )
    assert "--operating-point 'cores=0-3 a57=921.6MHz'" in second
    for pipeline, words in (
        ("graph/2-exact", "--exact"),
        ("graph/2-bf16", "--weights bf16"),
        ("graph/2-exact-bf16-all", "--exact --weights bf16-all"),
        ("gpu/2", "--device gpu"),
        ("gpu/2-exact", "--exact --device gpu"),
    ):
        changed = document | {"types": [document["types"][0] | {"pipeline": pipeline}]}
        command = next(each.command for each in artifact_folder.list_artifacts(changed))
        assert command == first.replace("--simulated", f"--simulated {words}")
    page = write_page(document, [])
    assert first in page
    assert second in page
