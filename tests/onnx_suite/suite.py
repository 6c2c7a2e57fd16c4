"""Run ONNX's tests of its operators by several processes; print a table; compare with the verdicts that are expected.

`make test-onnx` runs all of them; `--sample N` every fifth case from the N-th on. `--save` writes the verdicts, and
after a whole run the table in `docs/operators.md`.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import select
import statistics
import subprocess
import sys

import onnx

from farm.search.graph.folding import is_replaced
from tests.onnx_suite.cases import Case, list_cases

ROOT = pathlib.Path(__file__).parents[2]
PAGE, BEGIN, END = ROOT / "docs" / "operators.md", "<!-- table: operators -->\n", "<!-- end -->"
EXPECTED = pathlib.Path(__file__).with_name("expected.tsv")
KINDS = ("right", "refused", "internal", "wrong")
_CASE_S = 120.0
_SHARE = 5


def judge_all(names: list[str], jobs: int, *options: str) -> dict[str, dict[str, object]]:
    """Judge cases by `jobs` processes; a process that a case ends, or that takes too long, is replaced.

    `options` are those of `tests.onnx_suite.judging`.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    found: dict[str, dict[str, object]] = {}

    def work() -> None:
        child = None
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            if child is None:
                command = [sys.executable, "-m", "tests.onnx_suite.judging", *options]
                child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
                )
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{name}\n".encode())
            ready, _, _ = select.select([child.stdout], [], [], _CASE_S)
            line = child.stdout.readline() if ready else b""
            if line:
                found[name] = json.loads(line)
                continue
            child.kill()
            how = f"ended with {child.wait()}" if ready else f"took more than {_CASE_S:g} s"
            found[name] = {"name": name, "kind": "internal", "reason": f"its process {how}", "seconds": 0.0}
            child = None
        if child is not None:
            child.communicate(timeout=_CASE_S)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
    return found


def read_expected() -> dict[str, str]:
    """Read the cases that are not right: name and kind."""
    lines = EXPECTED.read_text().splitlines() if EXPECTED.exists() else []
    return dict(line.split("\t")[:2] for line in lines if not line.startswith("#"))  # type: ignore[misc]


def tabulate(cases: list[Case], found: dict[str, dict[str, object]]) -> str:
    """Make two tables from the cases that have one node: operators by how they are computed, and what is not right."""
    by_operator: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases:
        if len(case.model.graph.node) == 1:
            by_operator[case.model.graph.node[0].op_type].append(case)
    by_ways: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    wrong = ["| operator | right/cases | not right, because |", "|---|---|---|"]
    for operator, own in sorted(by_operator.items()):
        verdicts = [found[case.name] for case in own]
        right = [each for each in verdicts if each["kind"] == "right"]
        cpu = {_find_way(case.model.graph.node[0], found[case.name]) for case in own}
        ways = [cpu, *({str(each[key]) for each in right} for key in ("gpu", "bytes"))]
        if right:
            by_ways[tuple(", ".join(sorted(each - {""})) for each in ways)].append(operator)
        if len(right) < len(own):
            reasons = {_shorten(str(each["reason"]), operator) for each in verdicts if each["kind"] != "right"}
            wrong.append(f"| {operator} | {len(right)}/{len(own)} | {'; '.join(sorted(reasons))} |")
    rows = ["| CPU | GPU | 8 bits | operators |", "|---|---|---|---|"]
    rows += [f"| {' | '.join(ways)} | {', '.join(names)} |" for ways, names in sorted(by_ways.items())]
    return "\n".join([*rows, "", *wrong]) + "\n"


def _find_way(node: onnx.NodeProto, verdict: dict[str, object]) -> str:
    if verdict["kind"] != "right":
        return ""
    if is_replaced(node):
        return "body"
    functions, by_family = int(str(verdict["functions"])), int(str(verdict["by_family"]))
    return "no code" if not functions else "family" if by_family == functions else "TVM"


def _shorten(reason: str, operator: str) -> str:
    """Leave the node and the hint out of a refusal."""
    line = reason.splitlines()[0].partition(": it ")[2] if ": it " in reason else reason.splitlines()[0]
    return line.replace(f"the operator {operator}", "it").replace("|", "/")[:120]


def main() -> int:
    """Run it; 1 where a verdict is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes beside each other")
    parser.add_argument("--sample", type=int, help="only every fifth case, from this one on")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--save", action="store_true", help="write the verdicts as the expected ones")
    options = parser.parse_args()
    cases = list_cases()
    names = [case.name for case in cases if options.only in case.name]
    if options.sample is not None:
        names = names[options.sample % _SHARE :: _SHARE]
    whole = options.save and len(names) == len(cases)
    found = judge_all(names, options.jobs, *(["--survey"] if whole else []))
    counts = collections.Counter(str(each["kind"]) for each in found.values())
    expected = read_expected()
    for name in names:
        kind, reason = str(found[name]["kind"]), str(found[name]["reason"])
        if kind != expected.get(name, "right"):
            print(f"{name}: {kind}, not {expected.get(name, 'right')}: {reason}")
    seconds = statistics.median(float(str(each["seconds"])) for each in found.values())
    said = f"{len(names)} cases: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    print(f"{said}; median {seconds:.2f} s to compile")
    if options.save:
        expected |= {name: str(found[name]["kind"]) for name in names}
        rows = (f"{name}\t{kind}\n" for name, kind in sorted(expected.items()) if kind != "right")
        EXPECTED.write_text("".join(rows))
    if whole:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        counted = f"onnx {onnx.__version__}, {said}.\n\n"
        PAGE.write_text(f"{before}{BEGIN}{counted}{tabulate(cases, found)}{END}{rest.partition(END)[2]}")
    return int(any(found[n]["kind"] != expected.get(n, "right") for n in names))


if __name__ == "__main__":
    sys.exit(main())
