"""A sweep's report: what the page says, what the CSV holds, and pictures that are whole."""

from __future__ import annotations

import base64
import csv
import functools
import html.parser
import io
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from farm import units
from farm.report import drawing, sweep_charts, sweep_page
from farm.sweep import rows as sweep_rows
from tests.unit import sweep_documents

DOCUMENTS = {
    "nano, tuned and untuned": sweep_documents.nano,
    "nano, a third measured": lambda: sweep_documents.nano(every=3),
    "nano without a sensor": lambda: sweep_documents.nano(sensor=False),
    "tx2, three clocks": sweep_documents.tx2,
    "local": sweep_documents.local,
}


class Reader(html.parser.HTMLParser):
    """What a page shows as text, which tags stand open at its end, and what it would fetch."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts).replace("\xa0", " "))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if "src" in values:
            self.sources.append(values["src"] or "")
        if "href" in values:
            self.links.append(values["href"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The files of a document's whole report, written once: pictures take half a second each."""

    @functools.cache
    def write(name: str) -> dict[str, str]:
        return sweep_page.write_sweep_report(DOCUMENTS[name](), tmp_path_factory.mktemp("report") / "new" / "folder")

    return write


def make_page(document: dict[str, Any]) -> Reader:
    """The page of a document without its pictures, which take half a second each."""
    return Reader(sweep_page.write_page(document, []))


def test_counts_have_three_digits() -> None:
    """A count is written in the unit that fits it."""
    assert [units.format_count(each) for each in (0, 396, 114_688, 231_211_008.0)] == ["0", "396", "115 k", "231 M"]


@pytest.mark.parametrize("name", ["nano, a third measured", "nano without a sensor", "local"])
def test_page_needs_nothing_but_itself(written: Callable[[str], dict[str, str]], name: str) -> None:
    """Tags close, pictures are inside as data, nothing runs, and links go to the files beside it."""
    paths = written(name)
    page = Reader(pathlib.Path(paths["page"]).read_text(encoding="utf-8"))
    assert page.open == []
    assert not page.tags & {"script", "link", "iframe"}
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert {"sweep.csv", "sweep.json"} == set(page.links)
    for source in page.sources:
        svg = base64.b64decode(source.partition(",")[2]).decode()
        assert "<svg" in svg
        # A reference to elsewhere would be fetched, or be missing.
        assert not re.search(r'(href|src)="(?!#)', svg)


def test_page_answers_first() -> None:
    """What to set, what it takes with its interval, what it costs against the fastest, and how sure it is."""
    document = sweep_documents.nano()
    page = make_page(document)
    pick = sweep_rows.find_pick(document["series"][1])
    assert pick is not None
    before_pictures = page.text.partition("Pictures")[0]
    for words in (
        f"Set a57 {pick['key'].removeprefix('a57=').removesuffix('MHz')} MHz.",
        units.seconds_scale([0.01]).interval(pick["latency_s"])[1],
        "Against the fastest point (a57 1479 MHz) that is",
        "less energy",
        "is 93 %",
        "the least energy per inference",
        "tuned is 2.3",
        "times as fast as untuned",
        "times as many inferences per joule",
    ):
        assert words in before_pictures, words


def test_page_holds_what_was_merged_drift_and_notes() -> None:
    """Everything that was found out along the way is on the page."""
    page = make_page(sweep_documents.nano())
    for words in (
        "power modes MAXN differ in nothing that these clocks leave open",
        "the anchor drifted by 0.6 %",
        "the fan was held at 80 of 255",
        "POM_5V_CPU",
        "0.27.0",
    ):
        assert words in page.text, words


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_is_said_everywhere_or_nowhere(simulated: bool) -> None:
    """Title, banner, every table and every picture say it; for a real board nothing does."""
    document = sweep_documents.nano()
    document["board"] |= {"simulated": simulated, "watts": "watts assumed" if simulated else ""}
    page = make_page(document)
    tables = page.text.count("on jetson-nano, simulated")
    assert ("squeezenet1.1 on jetson-nano (simulated)" in page.text) is simulated
    assert tables == (4 if simulated else 0)
    assert ("Simulated:" in page.text) is simulated
    rows = read_csv(document)
    assert {row["simulated"] for row in rows} == {str(int(simulated))}
    if not simulated:
        assert "imulated" not in page.text


def test_predictions_are_marked() -> None:
    """Each row that was only predicted carries the word, in the page and in the CSV."""
    document = sweep_documents.nano(every=3)
    page = make_page(document)
    predicted = sum(row["predicted"] for series in document["series"] for row in series["rows"])
    assert page.text.count(" predicted ") >= predicted
    assert sum(row["predicted"] == "1" for row in read_csv(document)) == predicted


def test_no_sensor_is_said_and_not_shown_as_zero(written: Callable[[str], dict[str, str]]) -> None:
    """Without power there is no power column, no energy picture, and empty cells in the CSV."""
    document = sweep_documents.nano(sensor=False)
    page = make_page(document)
    assert "no power sensor" in page.text
    assert "power, W" not in page.text
    assert "energy," not in page.text.partition("Every operating point")[2]
    assert {name for name in written("nano without a sensor") if name not in ("page", "csv", "json")} == {"clock-a57"}
    assert {(row["energy_j"], row["power_w"], row["calls_per_joule"]) for row in read_csv(document)} == {("", "", "")}


def test_throttled_points_say_why() -> None:
    """A point that does not count stays in the table with its reason, and out of the pictures."""
    document = sweep_documents.tx2()
    page = make_page(document)
    assert "the board lowered a57 to 806.4 MHz" in page.text
    assert not any(row["throttled"] for row in sweep_rows.counted(document["series"][0]))


def test_many_predictions_are_left_to_the_csv() -> None:
    """A page of hundreds of guesses would hide what was measured: their number is said instead."""
    document = sweep_documents.tx2()
    page = make_page(document)
    rows = document["series"][0]["rows"]
    left_out = sum(not row["measured"] for row in rows)
    assert f"{left_out} more points were only predicted" in page.text
    assert len(read_csv(document)) == len(rows)


def test_no_pick_gives_the_reason() -> None:
    """A deadline that nothing keeps is reported with the nearest point, and a void sweep warns."""
    document = sweep_documents.nano(variants=("tuned",))
    document["series"][0] |= {"pick": None, "no_pick": "no point keeps 10 ms; the fastest takes 29.1 ms"}
    document |= {"state": "voided", "goal": document["goal"] | {"deadline_s": 0.01, "max_power_w": 7.5}}
    page = make_page(document)
    assert "No operating point can be recommended." in page.text
    assert "No point keeps 10 ms; the fastest takes 29.1 ms." in page.text
    assert "This sweep was voided" in page.text
    assert "a latency of at most 10.0 ms and a power of at most 7.50 W" in page.text
    only = sweep_documents.nano(variants=("tuned",))["series"][0]["rows"][-1:]
    answer = sweep_page.write_answers(document | {"series": [sweep_documents.series(only)]})[0]
    assert "power of at most 7.50 W." in answer.text


def test_empty_sweep_still_has_a_page() -> None:
    """A sweep that was ended before its first visit can be reported."""
    document = sweep_documents.nano(variants=("tuned",))
    page = make_page(document | {"series": [], "state": "interrupted"})
    assert "interrupted before it was done" in page.text


def test_names_stay_text() -> None:
    """A model's name cannot become markup."""
    document = sweep_documents.nano() | {"model": '<script>alert(1)</script> & "net"'}
    page = make_page(document)
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text


def test_batches_are_told_apart() -> None:
    """Each batch size has its own pictures, and throughput per joule counts inputs, not calls."""
    document = sweep_documents.nano(every=5, variants=("tuned",))
    single = document["series"][0]
    document["series"] = [single, json.loads(json.dumps(single)) | {"batch": 4}]
    page = make_page(document)
    names = [chart.name for chart in sweep_charts.plan_charts(document)]
    assert names == ["front-batch1", "clock-a57-batch1", "front-batch4", "clock-a57-batch4"]
    assert "inputs per J" in page.text
    rows = [row for row in read_csv(document) if row["operating_point"] == "a57=1479MHz"]
    assert float(rows[1]["inputs_per_joule"]) == pytest.approx(4 * float(rows[0]["inputs_per_joule"]))


def test_json_beside_the_page_is_the_document(written: Callable[[str], dict[str, str]]) -> None:
    """Nothing is lost or rounded on the way."""
    document, paths = sweep_documents.nano(sensor=False), written("nano without a sensor")
    assert json.loads(pathlib.Path(paths["json"]).read_text()) == document
    assert all(pathlib.Path(path).is_file() for path in paths.values())


def test_pictures_are_repeatable(tmp_path: pathlib.Path) -> None:
    """The same document gives the same bytes."""
    document, again = sweep_documents.nano(every=5, variants=("tuned",)), tmp_path / "again"
    again.mkdir()
    picture, same = (drawing.save(next(sweep_charts.plan_charts(document)), folder) for folder in (tmp_path, again))
    assert picture == same
    name = f"{picture.name}.png"
    assert (tmp_path / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.parametrize("name", ["nano, a third measured", "tx2, three clocks"])
def test_pictures_are_whole(written: Callable[[str], dict[str, str]], name: str) -> None:
    """Nothing touches a picture's edge, and something is drawn."""
    paths = [path for path in written(name).values() if path.endswith(".png")]
    assert paths
    for path in paths:
        image = np.asarray(Image.open(path).convert("RGB"))
        assert image.shape[1] == round(drawing.WIDTH_INCHES * drawing.DPI)
        for edge in (image[:3], image[-3:], image[:, :3], image[:, -3:]):
            assert (edge == 255).all(), path
        assert (image < 128).mean() > 0.003


def test_clocks_that_move_together_share_a_picture() -> None:
    """One picture per clock that was varied; clusters held at the same clocks everywhere are one."""
    assert sweep_rows.find_swept_clocks(sweep_documents.nano()) == [("a57",)]
    assert sweep_rows.find_swept_clocks(sweep_documents.tx2()) == [("a57",), ("denver",), ("gpu",)]
    rows = [
        sweep_documents.row(f"*={hz}", [("a78-0", hz, 4, True), ("a78-1", hz, 2, True)], 4e7)
        for hz in (729_600_000, 960_000_000)
    ]
    assert sweep_rows.find_swept_clocks(sweep_documents.document([sweep_documents.series(rows)])) == [
        ("a78-0", "a78-1")
    ]


def test_a_slice_changes_one_clock_only() -> None:
    """Points over a clock have all other clocks and the cores in common."""
    series = sweep_documents.tx2()["series"][0]
    rows = sweep_rows.choose_slice(series, ("gpu",))
    assert len(rows) == len(sweep_documents.TX2_GPU_HZ)
    assert len({row["key"].rpartition(" gpu=")[0] for row in rows}) == 1
    assert [sweep_rows.clock_hz(row, ("gpu",)) for row in rows] == sorted(sweep_documents.TX2_GPU_HZ)


def test_ratios_add_relative_errors_by_their_squares() -> None:
    """Two estimates of 3 % and 4 % have a ratio of about 5 %."""
    ratio = sweep_rows.divide(sweep_documents.estimate(3.0, 0.03), sweep_documents.estimate(2.0, 0.04))
    assert ratio.value == pytest.approx(1.5)
    assert (ratio.high / ratio.value - 1) == pytest.approx(0.05, rel=0.05)
    assert not ratio.is_one


@pytest.mark.parametrize(
    ("estimate", "told"),
    [
        ((0.0341, 0.0339, 0.0344), ("34.10", "33.90 – 34.40")),
        ((0.0341, 0.030, 0.040), ("34.1", "30.0 – 40.0")),
        ((2.759, 2.7, 2.8), ("2,759", "2,700 – 2,800")),
    ],
)
def test_intervals_have_the_digits_that_they_need(estimate: tuple[float, float, float], told: tuple[str, str]) -> None:
    """The ends are distinguishable, and there are no digits beyond that."""
    values = dict(zip(("value", "low", "high"), estimate, strict=True))
    assert units.Scale(1e3, "ms").interval(values) == told


def test_answers_begin_with_what_is_shipped() -> None:
    """Tuned comes first in any order of the series, and a predicted pick says that it is one."""
    document = sweep_documents.nano()
    assert [answer.series for answer in sweep_page.write_answers(document)] == ["tuned", "untuned"]
    pick = sweep_rows.find_pick(document["series"][1])
    assert pick is not None
    pick |= {"measured": False, "predicted": True}  # type: ignore[operator]
    assert "not measured" in sweep_page.write_answers(document)[0].text


def read_csv(document: dict[str, Any]) -> list[dict[str, str]]:
    """The CSV that stands beside the page."""
    return list(csv.DictReader(io.StringIO(sweep_page.write_csv(document))))


def test_csv_keeps_what_the_visits_alone_say() -> None:
    """Beside the figures joined with the fit, and empty where a point was not measured."""
    document = sweep_documents.nano(every=3)
    row = next(row for row in document["series"][0]["rows"] if row["measured"])
    row["visits_alone"] = {
        "latency_s": sweep_documents.estimate(0.0125), "power_w": None, "energy_j": sweep_documents.estimate(0.05)
    }  # fmt: skip
    lines = list(csv.DictReader(io.StringIO(sweep_page.write_csv(document))))
    told = [line for line in lines if line["visits_latency_s"]]
    assert len(told) == 1
    assert float(told[0]["visits_latency_s"]) == 0.0125
    assert float(told[0]["visits_energy_j_high"]) == pytest.approx(0.0505)
    assert told[0]["visits_power_w"] == ""


def test_a_gain_of_hundreds_is_told_as_a_factor() -> None:
    """Not as 0 % of the time, nor as a ratio of 0.00."""
    ratios = [sweep_rows.VariantRatio(1 / 269, 1 / 280, 1 / 260), sweep_rows.VariantRatio(1 / 250, 1 / 251, 1 / 249)]
    told = sweep_page._times(ratios, "is {} times as fast", "takes {} times as long")
    assert told == "is 259 times as fast (250 – 269)"
    assert sweep_page._times(
        [sweep_rows.VariantRatio(1.25, 1.2, 1.3)], "is {} times as fast", "takes {} times as long"
    ) == ("takes 1.25 times as long")
