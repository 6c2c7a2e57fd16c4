"""The result of a gate, for CI systems and people: JUnit XML and a page in Markdown, from the gate's document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree  # written, never read

from farm import foreign
from farm.gate import SCORES
from farm.points.values import format_conditions
from farm.report import pages
from farm.units import format_bytes

# XML 1.0 allows no control characters.
_clean = foreign.show_controls
_MARKS = {"pass": "passed", "fail": "**FAILED**", "undecided": "*undecided*"}


def write_junit(document: Mapping[str, Any]) -> str:
    """Return one suite for each board, with a case for its outputs and for each condition.

    Undecided cases are failures where the gate fails on them, else skipped.
    """
    root = ElementTree.Element("testsuites", name="farm gate")
    for part in document["boards"]:
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(_name(part)))
        called = _clean(f"{part['model']}.{part['board_type']}")
        case = ElementTree.SubElement(suite, "testcase", classname=called, name="outputs agree with the reference")
        if not part["verified"]["matches"]:
            ElementTree.SubElement(case, "failure", message=_clean(part["verified"]["reason"]))
        for each in part["conditions"]:
            case = ElementTree.SubElement(suite, "testcase", classname=called, name=_clean(each["condition"]))
            message = _clean(describe(each))
            if each["verdict"] == "fail" or (each["verdict"] == "undecided" and document["undecided"] == "fail"):
                ElementTree.SubElement(case, "failure", message=message, type=each["verdict"])
            elif each["verdict"] == "undecided":
                ElementTree.SubElement(case, "skipped", message=f"undecided: {message}")
            ElementTree.SubElement(case, "system-out").text = message
        cases = suite.findall("testcase")
        suite.set("tests", str(len(cases)))
        for kind, name in (("failure", "failures"), ("skipped", "skipped")):
            suite.set(name, str(sum(each.find(kind) is not None for each in cases)))
        suite.set("errors", "0")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def write_summary(document: Mapping[str, Any]) -> str:
    """Return the page that a CI system shows beside the run."""
    boards = [
        part
        | {
            "name": _name(part),
            "ran_at": format_conditions(part["threads"], part["clocks"], part["operating_point"]),
            "conditions": [each | {"found": describe(each)} for each in part["conditions"]],
        }
        for part in document["boards"]
    ]
    filters: dict[str, Callable[[Any], str]] = {"escape_more": _escape, "bytes": format_bytes}
    return pages.render_markdown("gate.md", {**document, "boards": boards, "marks": _MARKS}, filters)


def list_findings(document: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """List wrong outputs and every condition: board, condition, what was found, verdict."""
    rows = []
    for part in document["boards"]:
        called = f"{part['board_type']}/{part['board']}{' (simulated)' if part['simulated'] else ''}"
        if not part["verified"]["matches"]:
            rows.append((called, "outputs agree", part["verified"]["reason"], "fail"))
        rows += [(called, each["condition"], describe(each), each["verdict"]) for each in part["conditions"]]
    return rows


def explain(document: Mapping[str, Any]) -> str:
    """Say why the gate did not pass."""
    reasons = []
    for part in document["boards"]:
        if not part["verified"]["matches"]:
            reasons.append(f"wrong outputs on {part['board']}: {part['verified']['reason']}")
        reasons += [
            f"{each['condition']} {'holds' if each['verdict'] == 'fail' else 'cannot be ruled out'} on "
            f"{part['board']}: {describe(each)}"
            for each in part["conditions"]
            if each["verdict"] != "pass"
        ]
    return "; ".join(reasons)


def describe(condition: Mapping[str, Any]) -> str:
    """Describe the finding of a condition in a few words."""
    if condition["value"] is None:
        return "there is no baseline" if condition["metric"] in SCORES else "the board has no sensor for it"
    value, low, high = (condition[key] for key in ("value", "low", "high"))
    if condition["metric"] in SCORES:
        sign = "+" if condition["is_change"] else ""
        unit = "points" if sign else "%"
        return f"{100 * value:{sign}.2f} {unit} ({100 * low:{sign}.2f} to {100 * high:{sign}.2f})"
    if condition["is_change"]:
        return f"{_change(value)} ({_change(low)} to {_change(high)})"
    return f"{_figure(condition['metric'], value)} ({_figure(condition['metric'], low)} to " + (
        f"{_figure(condition['metric'], high)})"
    )


def _name(part: Mapping[str, Any]) -> str:
    device = " on the GPU" if part["device"] == "gpu" else ""
    return f"{part['model']}{device}, {part['board_type']}/{part['board']}"


def _change(ratio: float) -> str:
    return "no limit" if ratio == float("inf") else f"{(ratio - 1) * 100:+.1f} %"


def _figure(metric: str, value: float) -> str:
    if metric == "energy":
        return f"{value * 1e3:.3g} mJ"
    return format_bytes(int(value)) if metric in ("size", "memory") else f"{value * 1e3:.4g} ms"


def _escape(text: str) -> str:
    return "".join(f"\\{each}" if each in "\\`*_{}[]<>|#" else each for each in foreign.show_controls(text))
