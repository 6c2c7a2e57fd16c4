"""Fill the generated parts of documents from the code.

A part stands in its page between `<!-- generated: NAME -->` and `<!-- end -->`; `reference.py` writes each of them
again. A part marked `<!-- on the site: NAME -->` is long: only `make docs` fills it, and `reference.py NAME` prints it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import typer.main

from device_agent.protocol import outcome
from farm import settings
from farm.cli import main
from farm.metrics import farm_metrics

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PART = re.compile(r"(?s)<!-- generated: (\w+) -->\n.*?<!-- end -->")
_ON_THE_SITE = re.compile(r"<!-- on the site: (\w+) -->")
# Constants that end a wait. Pauses between tries and intervals of looking end with `_S` as well.
_DEADLINE = re.compile(r"_?\w*(TIMEOUT|DEADLINE|GRACE|TTL|PATIENCE|WAIT|LIMIT)_S")


def list_commands() -> str:
    """Return one row for each command."""
    rows = ((f"`farm {name}`", _first_sentence(_read_help(command))) for name, command in walk_commands())
    return _table(("command", "what it does"), rows)


def list_options() -> str:
    """Return every command with its arguments, options and example."""
    return "\n\n".join("\n".join(_describe(name, command)) for name, command in walk_commands())


def list_settings() -> str:
    """Return one row for each setting."""
    rows = (
        (f"`{field.metadata['env']}`", f"`{field.default}`" if field.default != "" else "", field.metadata["meaning"])
        for field in dataclasses.fields(settings.Settings)
    )
    return _table(("variable", "default", "meaning"), rows)


def list_metrics() -> str:
    """Return one row for each metric of the coordinator."""
    metrics = (each for each in vars(farm_metrics).values() if isinstance(each, farm_metrics.Metric))
    rows = ((f"`{each.full_name}`", ", ".join(f"`{label}`" for label in each.labels), each.help) for each in metrics)
    return _table(("metric", "labels", "meaning"), rows)


def list_statuses() -> str:
    """Return one row for each status of a trial: its meaning, its fault side, and what that side means."""
    meanings, effects = _read_members(outcome.Status), _read_members(outcome.FaultSide)
    rows = []
    for status in outcome.Status:
        side = status.fault_side
        rows.append(
            (f"`{status}`", meanings.get(status.name, ""), side or "", effects[side.name] if side else "counts")
        )
    return _table(("status", "meaning", "fault side", "effect"), rows)


def list_deadlines() -> str:
    """Return one row for each constant that ends a wait: its value in seconds, its module and its reason."""
    rows = []
    for package in ("device_agent", "farm"):
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            rows += [(f"`{name}`", value, f"`{place}`", reason) for name, value, reason in _read_deadlines(path)]
    return _table(("constant", "s", "where", "why"), rows)


def list_folders() -> str:
    """Return one row for the agent and for each package of the coordinator: the first sentence of its docstring."""
    rows = []
    for pattern in ("device_agent/__init__.py", "farm/*/__init__.py"):
        for path in sorted(ROOT.glob(pattern)):
            if text := ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
                rows.append((f"`{path.parent.relative_to(ROOT)}/`", _first_sentence(text)))
    return _table(("folder", "contents"), rows)


def list_layers() -> str:
    """Return the layers of import-linter's first contract, the highest first."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return "```\n" + "\n".join(document["tool"]["importlinter"]["contracts"][0]["layers"]) + "\n```"


PARTS: Mapping[str, Callable[[], str]] = {
    "commands": list_commands,
    "options": list_options,
    "settings": list_settings,
    "metrics": list_metrics,
    "statuses": list_statuses,
    "deadlines": list_deadlines,
    "folders": list_folders,
    "layers": list_layers,
}


def fill(text: str) -> str:
    """Return a page with its generated parts as the code has them now."""
    return _PART.sub(lambda part: f"<!-- generated: {part[1]} -->\n{PARTS[part[1]]()}\n<!-- end -->", text)


def fill_for_site(text: str) -> str:
    """Return a page with the parts that only the site has."""
    return _ON_THE_SITE.sub(lambda part: PARTS[part[1]](), text)


def find_pages() -> Iterator[pathlib.Path]:
    """Find the pages with generated parts."""
    for path in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*/README.md")]):
        if _PART.search(path.read_text(encoding="utf-8")):
            yield path


def walk_commands() -> Iterator[tuple[str, Any]]:
    """Walk the commands that do something, each with its words."""
    whole: Any = typer.main.get_command(main.make_app())
    main.complete(whole)
    return _walk_below(whole, "")


def _walk_below(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        verbs = getattr(command, "commands", None)
        if not verbs or command.invoke_without_command:
            yield f"{prefix}{name}", command
        if verbs:
            yield from _walk_below(command, f"{prefix}{name} ")


def _read_help(command: Any) -> str:
    """Read what a command does; a noun's help is about its verbs, its function's about the noun alone."""
    is_noun = getattr(command, "commands", None)
    return textwrap.dedent((inspect.getdoc(command.callback) if is_noun else command.help) or "").strip()


def _describe(name: str, command: Any) -> Iterator[str]:
    yield f"## farm {name}"
    yield _read_help(command)
    rows = []
    for each in command.params:
        is_argument = each.param_type_name == "argument"
        if is_argument or not each.hidden:
            word = each.metavar or each.name.upper()
            names = word if is_argument else ", ".join([*each.opts, *each.secondary_opts])
            rows.append((f"`{names}`", getattr(each, "help", None) or ""))
    if rows:
        yield f"\n{_table(('option', 'meaning'), rows)}"
    if example := re.sub(r"(?s).*Example:\s*", "", command.epilog or ""):
        yield f"\n```sh\n{example}\n```"


def _read_members(kind: type) -> dict[str, str]:
    """Read what the comment behind each member of an enumeration says."""
    return dict(re.findall(r'(?m)^ +([A-Z_]+) = "\w+"  # (.*)$', inspect.getsource(kind)))


def _read_deadlines(path: pathlib.Path) -> Iterator[tuple[str, str, str]]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.parse(source).body if re.search(rf"(?m)^{_DEADLINE.pattern}\b", source) else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and _DEADLINE.fullmatch(target.id):
            above = node.lineno - 1
            while above and lines[above - 1].startswith("#"):
                above -= 1
            reason = " ".join(line.lstrip("# ") for line in lines[above : node.lineno - 1])
            yield target.id, ast.unparse(node.value), reason  # type: ignore[attr-defined]


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].removesuffix(".")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    head = tuple(head)
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def write() -> None:
    """Print the parts that are named on the command line, or fill all pages."""
    for name in sys.argv[1:]:
        print(PARTS[name]())
    if not sys.argv[1:]:
        for path in find_pages():
            path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
