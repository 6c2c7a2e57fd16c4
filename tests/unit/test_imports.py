"""Who may import what, where import-linter has no words for it: ray and tvm are kept to a few modules.

The directions between our own packages are contracts in pyproject.toml.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
import subprocess
import sys

import pytest
import typer.main

from farm.cli.main import make_app

ROOT = pathlib.Path(__file__).parents[2]
MODULES = sorted(p for package in ("farm", "device_agent") for p in (ROOT / package).rglob("*.py"))

# package -> the modules, as a pattern over paths from the root, that may import it
ALLOWED = {
    "ray": (r"farm/campaign/engine/(builds|ray_calls|ray_nodes|ray_private|searches)\.py"),
    "tvm": (
        r"farm/(search|artifacts|metaschedule)/.*\.py|farm/measure/session\w*\.py"
        # On the board, what serves or runs candidates may; what reads hardware and minds processes may not.
        r"|(farm/virtual/(pace|emulated/runs)|device_agent/(platforms/gpu|(listener|session|worker)/\w+))\.py"
    ),
}
ALLOWED["tvm_ffi"] = ALLOWED["tvm"] + r"|device_agent/agent\.py"
# The page's server, which a farm without `farm web` does without; a check whether it runs loads none of it.
for _package in ("fastapi", "starlette", "uvicorn"):
    ALLOWED[_package] = r"farm/web/(?!running)\w+\.py"
# Its licence asks for a process of its own: what the agent imports must not import it.
ALLOWED["unicorn"] = r"farm/virtual/emulated/machine\.py"
ALLOWED["capstone"] = r"farm/virtual/emulated/isa\.py"
_SLOW_TO_LOAD = re.compile(rf"(?m)^\s*(?:import|from)\b.*\b(?:{'|'.join(ALLOWED)})\b")
# The page's documents are called what they show, as their schema has it.
DOUBLED = 4


@dataclasses.dataclass
class Outline:
    """What is asked of a module: top-level packages that it imports, each with the first line that does, and more."""

    text: str
    documented: bool
    packages: dict[str, int] = dataclasses.field(default_factory=dict)
    classes: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def read_outline(path: pathlib.Path) -> Outline:
    """A module's; it is parsed only where it may import what `ALLOWED` keeps to a few."""
    text = path.read_text(encoding="utf-8")
    found = Outline(text, text.lstrip().startswith('"""'), classes=re.findall(r"(?m)^ *class (\w+)[(:]", text))
    if _SLOW_TO_LOAD.search(text):
        for node in ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.packages.setdefault(alias.name.partition(".")[0], node.lineno)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.packages.setdefault(node.module.partition(".")[0], node.lineno)
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_only_the_named_modules_import(package: str) -> None:
    """A package that is slow to load or ties us to one machine is imported only where DESIGN allows it."""
    foreign = [
        f"{relative}:{line}"
        for path in MODULES
        if (line := read_outline(path).packages.get(package))
        and not re.fullmatch(ALLOWED[package], relative := str(path.relative_to(ROOT)))
    ]
    assert not foreign, f"these modules may not import {package}: {', '.join(foreign)}"


def test_modules_say_what_lives_in_them_by_name_and_docstring() -> None:
    """Each module that holds anything starts with a docstring. `utils`, `helpers`, `common` and `misc` are not places;
    the clock helper is what it is called everywhere.
    """
    outlines = {path: read_outline(path) for path in MODULES}
    assert not [str(path) for path, outline in outlines.items() if outline.text.strip() and not outline.documented]
    empty = {"utils", "helpers", "common", "misc", "util", "helper"}
    assert [str(p.relative_to(ROOT)) for p in MODULES if p.stem in empty] == ["device_agent/clocks/helper.py"]


def test_the_agents_command_comes_before_numpy() -> None:
    """NumPy starts BLAS threads unless configured before its import, and the agent forks: `main` does so."""
    script = "import sys, device_agent.agent; print({'numpy', 'tvm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


# Several in one process, which is started once: what none of them loads is not there at the end.
def load(program: str) -> set[str]:
    """What is loaded after a program of Python's."""
    program = f"import sys\nfrom farm.cli.main import main, make_app\n{program}\nprint('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    return set(done.stdout.splitlines()[-1].split())


def test_a_command_loads_what_it_needs_alone() -> None:
    """It begins without what reads models, computes or speaks SSH: those take longer than it does. What makes a
    campaign's artifacts takes several times as long to load as all the rest of these commands. `farm model show`
    needs no database. Starting and ending the page's process, its address and its token need nothing of what serves
    it. Help, the version and a word that is none are answered at once.
    """
    commands = [("status",), ("board", "list"), ("board", "show"), ("board", "add")]
    loaded = load(f"for words in {commands}: make_app(words[0])")
    assert "farm.cli.board" in loaded
    assert not {"numpy", "onnx", "paramiko", "pydantic", "ray", "tvm"} & loaded
    assert not {"numpy", "onnx", "paramiko", "ray", "tvm"} & load("make_app('campaign')")
    assert not {"sqlalchemy", "matplotlib", "ray", "tvm"} & load("make_app('model')")
    # Neither does the choice of boards and pipelines that a plan begins with.
    assert "tvm" not in load("from farm.campaign import plan_boards\nplan_boards.choose_boards.__name__")
    commands = [("up",), ("down",), ("web", "--url"), ("web", "token")]
    loaded = load(f"for words in {commands}: make_app(words[0])\nfrom farm.web import access, running")
    assert not {"fastapi", "starlette", "uvicorn", "jinja2"} & loaded
    loaded = load(
        "for words in [], ['--help'], ['--version'], ['cmpaign']:\n"
        " sys.argv = ['farm', *words]\n"
        " try: main()\n"
        " except SystemExit: pass"
    )
    assert not {"sqlalchemy", "matplotlib", "numpy", "farm.store", "farm.cli.options"} & loaded


def test_only_what_compiles_loads_tvm() -> None:
    """A process that holds a board has TVM's runtime library: there TVM's compiler cannot be loaded any more."""
    compiles = re.compile(r"farm/(search|metaschedule|artifacts/runtime)/.*|.*(__main__|_child)\.py")
    names = [
        str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in MODULES
        if path.is_relative_to(ROOT / "farm")
        and "tvm" not in read_outline(path).packages
        and not compiles.fullmatch(str(path.relative_to(ROOT)))
    ]
    assert len(names) > 200
    loaded = load(f"import importlib\nfor name in {names}: importlib.import_module(name).__doc__")
    assert "tvm" not in loaded


def test_commands_are_listed_as_they_are() -> None:
    """The list that loads nothing says what the whole one does."""
    wholly, alone = (typer.main.get_command(make_app(names_only=names_only)) for names_only in (False, True))
    listed = [
        [(name, each.short_help, each.hidden) for name, each in group.commands.items()]  # type: ignore[attr-defined]
        for group in (wholly, alone)
    ]
    assert sorted(listed[0]) == sorted(listed[1])


def test_code_in_strings_names_what_is_there() -> None:
    """Programs for child processes are text, which no checker reads: what they import, or run by `-m`, exists."""
    missing = []
    others = [path for folder in ("benchmarks", "deploy", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in (*MODULES, *others):
        text = path.read_text(encoding="utf-8")
        wanted = set(re.findall(r"\"-m\", \"((?:farm|device_agent)[\w.]*)\"", text))
        for package, names in re.findall(
            r"(?:^|; |[\"'(]|\\n) *from ((?:farm|device_agent)[\w.]*) import (\w+(?:, \w+)*)", text, re.M
        ):
            wanted |= {f"{package}.{name}" for name in names.split(", ")}
        missing += [f"{path.relative_to(ROOT)}: {each}" for each in sorted(wanted) if not _is_there(each)]
    assert not missing


@functools.cache
def _is_there(name: str) -> bool:
    """Whether a dotted name is a module of ours, or something that stands in one."""
    package, _, last = name.rpartition(".")
    places = [ROOT.joinpath(*each.split(".")) for each in (name, package)]
    modules = [
        each.with_suffix(".py") if each.with_suffix(".py").is_file() else each / "__init__.py" for each in places
    ]
    return modules[0].is_file() or (
        modules[1].is_file() and re.search(rf"\b{last}\b", modules[1].read_text()) is not None
    )


def test_a_name_means_one_thing() -> None:
    """Words that much of the farm speaks of are the name of one class each."""
    words = {
        "Workload", "Engine", "HeldBoard", "Settings", "Verdict", "Measured", "Built", "Order", "Program",
        "SearchActor",
    }  # fmt: skip
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for name in filter(words.__contains__, read_outline(path).classes):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_few_names_are_taken_twice() -> None:
    """Of the farm's own public classes, and none twice in one package."""
    places: dict[str, list[pathlib.Path]] = {}
    for path in (ROOT / "farm").rglob("*.py"):
        if path.is_relative_to(ROOT / "farm" / "virtual"):  # hardware has names of its own
            continue
        for name in read_outline(path).classes:
            if not name.startswith("_"):
                places.setdefault(name, []).append(path)
    doubled = {name: found for name, found in places.items() if len(found) > 1}
    assert len(doubled) <= DOUBLED, sorted(doubled)
    assert not [name for name, found in doubled.items() if len({path.parent for path in found}) < len(found)]
