"""The dashboards and alerts in deploy/ ask for what is exported. A real Prometheus answers them in
tests/integration/test_prometheus.py.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from farm.metrics import farm_metrics

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
LABELS = {metric.full_name: set(metric.labels) for metric in farm_metrics.METRICS}
LABELS |= {
    f"{metric.full_name}_{end}": {*metric.labels, *more}
    for metric in farm_metrics.METRICS
    if metric.kind == "histogram"
    for end, more in (("bucket", ("le",)), ("sum", ()), ("count", ()))
}
# What Prometheus itself says of whom it scraped; boards' own metrics get their names from `/targets`.
SCRAPED = {"job", "instance", "board", "board_type"}


def read(path: pathlib.Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def list_expressions() -> Iterator[tuple[str, str, str]]:
    """Where each expression stands, the expression, and the text that shows labels of its series."""
    for path in DASHBOARDS:
        for panel in read(path)["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "tvm-farm.rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], ""


def find_labels(text: str) -> set[str]:
    inside = " ".join(re.findall(r"\{([^}]*)\}", text))
    grouped = " ".join(re.findall(r"\b(?:by|on|ignoring|group_left)\s*\(([^)]*)\)", text))
    return set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)) | set(re.findall(r"\w+", grouped))


def test_every_expression_asks_for_what_is_exported() -> None:
    """Names of metrics and labels are those of the table, in selectors, groupings and legends."""
    found = list(list_expressions())
    assert len(found) > 50
    for where, expression, legend in found:
        names = set(re.findall(r"\b(tvm_farm_\w+)", expression))
        assert names <= LABELS.keys(), where
        if "device_agent_" in expression or "up{" in expression:
            continue  # a board's own labels are its sensors': the real Prometheus is asked for them
        known = SCRAPED.union(*(LABELS[name] for name in names))
        assert names, where
        assert find_labels(expression) <= known, where
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known, where


def test_every_metric_is_looked_at_somewhere() -> None:
    """A metric that no dashboard and no alert asks for is superfluous."""
    asked = " ".join(expression for _, expression, _ in list_expressions())
    unseen = {metric.name for metric in farm_metrics.METRICS if metric.full_name not in asked}
    assert unseen == {"info", "board_last_seen_timestamp_seconds"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_imported(path: pathlib.Path) -> None:
    """Its data source is chosen by the importer; panels have numbers of their own, a place, and no overlap."""
    document = read(path)
    assert document["schemaVersion"] >= 41  # Grafana 12; newer ones bring it up themselves
    variables = [each["name"] for each in document["templating"]["list"]]
    assert variables[0] == "datasource"
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        used = set(re.findall(r"\$(\w+)", json.dumps(panel["targets"]))) - {"__rate_interval"}
        assert used <= set(variables), panel["title"]
