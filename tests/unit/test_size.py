"""The house stays small and plain: caps in `caps.yaml`, sums in `sums.yaml`, words to avoid in `words.yaml`."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess

import pytest
import yaml

from farm.provision.bundle_build import find_agent_source, pack_agent

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CAPS = yaml.safe_load((HERE / "caps.yaml").read_text(encoding="utf-8"))
SUMS = yaml.safe_load((HERE / "sums.yaml").read_text(encoding="utf-8"))
WORDS = yaml.safe_load((HERE / "words.yaml").read_text(encoding="utf-8"))
NATIVE = (".c", ".cc", ".h", ".inc", ".cu")
# The changelog and the results of benchmarks speak of the past.
UNREAD = re.compile(r"CHANGELOG\.md|benchmarks/results/.*|tests/unit/words\.yaml|tests/acceptance/axe/.*")
READ = {".md", ".py", ".yaml", ".html", ".sh", ".c", ".cc", ".h", ".inc", ".service"}


@functools.cache
def list_files() -> tuple[str, ...]:
    """Every file of the repository, by its path from the root; in an archive without git, those that lie there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return tuple(each for each in listed.stdout.split("\0") if each and (ROOT / each).is_file())


@functools.cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def list_modules(*packages: str) -> list[str]:
    return [each for each in list_files() if each.endswith(".py") and each.partition("/")[0] in packages]


def count_lines(package: str, *endings: str) -> int:
    files = (each for each in list_files() if each.partition("/")[0] == package and each.endswith(endings))
    return sum(read(each).count("\n") for each in files)


@pytest.mark.parametrize("package", sorted(CAPS["lines"]))
def test_lines(package: str) -> None:
    """A top-level package keeps to its lines of Python, C and C++: who needs some takes them from another room."""
    assert count_lines(package, ".py", *NATIVE) <= CAPS["lines"][package]


def test_sums(tmp_path: pathlib.Path) -> None:
    """Product, bundle, tests, benchmarks and documents keep to their sums, which only fall."""
    now = {
        "product": sum(count_lines(package, ".py") for package in ("farm", "device_agent", "deploy")),
        "agent": count_lines("device_agent", ".py", *NATIVE),
        "agent_wheel_bytes": pack_agent(find_agent_source(), tmp_path).stat().st_size,
        "tests": count_lines("tests", ".py"),
        "benchmarks": count_lines("benchmarks", ".py"),
        "words_of_documents": sum(len(read(each).split()) for each in list_files() if each.endswith(".md")),
    }
    assert {name: number for name, number in now.items() if number > SUMS[name]} == {}


def test_modules() -> None:
    """There are not more modules than the cap, nor more long ones."""
    lengths = {each: read(each).count("\n") for each in list_modules("farm", "device_agent")}
    assert len(lengths) <= CAPS["modules"]
    assert len([length for length in lengths.values() if length > 400]) <= CAPS["long_modules"]


def test_functions() -> None:
    """Few functions are longer than 60 lines."""
    found = [
        f"{path}:{node.lineno}"
        for path in list_modules("farm", "device_agent", "deploy")
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert len(found) <= CAPS["long_functions"], found


def test_local_imports() -> None:
    """Imports stand at the top of a module; `farm.lazy` keeps start-up short."""
    found = {
        (path, inner.lineno)
        for path in list_modules("farm", "device_agent")
        if re.search(r"(?m)^[ \t]+(import|from) ", read(path))  # no other has any
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    assert len(found) <= CAPS["local_imports"]


def test_words_of_the_list() -> None:
    """Documents and code use the field's words: each find is a file, a line and the better word."""
    # One search for all of them, ten times as fast as one for each; each begins with a word.
    anything = re.compile(rf"\b({'|'.join(pattern.removeprefix(chr(92) + 'b') for pattern in WORDS)})")
    found = [
        f"{path}:{number}: {match[0]!r}: write {better}"
        for path in list_files()
        if pathlib.PurePath(path).suffix in READ and not UNREAD.fullmatch(path)
        if anything.search(read(path).lower())
        for number, line in enumerate(read(path).lower().splitlines(), 1)
        for pattern, better in WORDS.items()
        for match in re.finditer(pattern, line)
    ]
    assert len(found) <= CAPS["words_of_the_list"], "\n".join(found)
