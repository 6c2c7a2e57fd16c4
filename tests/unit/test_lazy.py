"""`farm.lazy`: a module's code runs when one of its names is first read, once, after its package's."""

from __future__ import annotations

import importlib
import pathlib
import pickle
import sys
import threading
from collections.abc import Iterator

import pytest

import farm

LOG: list[str] = []


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.setattr(farm, "__path__", [*farm.__path__, str(tmp_path)])
    LOG.clear()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("farm.tried"):
            del sys.modules[name]
            vars(farm).pop(name.split(".")[1], None)


def write(folder: pathlib.Path, name: str, code: str = "") -> None:
    path = folder.joinpath(*name.split("/"))
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"from tests.unit.test_lazy import LOG\nLOG.append(__name__)\n{code}\n")


def test_a_module_runs_when_a_name_is_read(folder: pathlib.Path) -> None:
    """Importing it, and reading what the import system reads, does not run it."""
    write(folder, "tried.py", "VALUE = 7")
    module = importlib.import_module("farm.tried")
    assert module.__name__ == "farm.tried"
    assert module.__spec__ is not None
    assert LOG == []
    assert module.VALUE == 7
    assert module.VALUE == 7
    assert LOG == ["farm.tried"]
    assert type(module) is type(sys)


def test_a_package_runs_before_its_modules(folder: pathlib.Path) -> None:
    """As with plain imports; a package may read names of its modules meanwhile."""
    write(folder, "tried/__init__.py", "import farm.tried.inner\nfarm.tried.inner.VALUE")
    write(folder, "tried/inner.py", "VALUE = 7")
    inner = importlib.import_module("farm.tried.inner")
    assert inner.VALUE == 7
    assert LOG == ["farm.tried", "farm.tried.inner"]


def test_what_is_missing_is_told_at_its_use(folder: pathlib.Path) -> None:
    """A typing error in an import shows where it stands. A module that failed is run again: what it lacked may be there
    by then.
    """
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("farm.tried_in_vain")
    write(folder, "tried.py", "if len(LOG) < 2: raise OSError('disk')\nVALUE = 7")
    module = importlib.import_module("farm.tried")
    with pytest.raises(OSError, match="disk"):
        _ = module.VALUE
    assert module.VALUE == 7


def test_an_error_within_a_module_is_not_a_missing_name(folder: pathlib.Path) -> None:
    """`hasattr` and `from … import` tell what failed, and where."""
    write(folder, "tried.py", "import sys\nsys.no_such_name")
    module = importlib.import_module("farm.tried")
    with pytest.raises(ImportError, match=r"farm.tried cannot be loaded: .*no_such_name"):
        hasattr(module, "VALUE")


def test_threads_run_it_once_and_see_it_whole(folder: pathlib.Path) -> None:
    """A thread that reads a name while another runs the module waits for it."""
    (folder / "tried.py").write_text(
        "from tests.unit import test_lazy\n"
        "test_lazy.LOG.append(__name__)\n"
        "test_lazy.STARTED.set()\n"
        "test_lazy.GATE.wait(10)\n"
        "VALUE = 7\n"
    )
    STARTED.clear()
    GATE.clear()
    module = importlib.import_module("farm.tried")
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(module.VALUE)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert STARTED.wait(10)
    assert seen == []
    GATE.set()
    for thread in threads:
        thread.join(10)
    assert seen == [7] * 4
    assert LOG == ["farm.tried"]


STARTED, GATE = threading.Event(), threading.Event()


def test_an_unused_module_can_be_pickled_as_a_reference(folder: pathlib.Path) -> None:
    """Ray sends functions whose globals are modules."""
    write(folder, "tried.py")
    module = importlib.import_module("farm.tried")
    assert pickle.loads(pickle.dumps(module)) is module
    assert LOG == []


def test_setting_a_name_runs_the_module_first(folder: pathlib.Path) -> None:
    """What a test or a user sets is not overwritten by the module's own code later."""
    write(folder, "tried.py", "VALUE = 7")
    module = importlib.import_module("farm.tried")
    module.VALUE = 8  # type: ignore[attr-defined]
    assert module.VALUE == 8
