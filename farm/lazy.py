"""Load the farm's modules on first use, so that a command loads only what it runs.

`import farm.x` and `from farm.x import module` cost a file lookup; the module's code runs when one of its names is
read. `from farm.x.module import Name` reads a name, so it runs the module at once. Packages of others load at once.
Python 3.15 has this as a statement (PEP 810).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

# What the import system and pickle read, and set, before a module's code has run.
_METADATA = frozenset(
    {
        "__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__", "__class__",
        "__reduce_ex__",
    }
)  # fmt: skip


class _LazyModule(types.ModuleType):
    """A module whose code has not run, or runs now; becomes a plain module once it has."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return importlib.import_module, (self.__name__,)

    def __getattribute__(self, name: str) -> Any:
        if name not in _METADATA:
            _load(self)
        return types.ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets metadata, and each child in its parent.
        if name not in _METADATA and not isinstance(value, types.ModuleType):
            _load(self)
        types.ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _load(self)
        types.ModuleType.__delattr__(self, name)


class _LazyLoader(importlib.abc.Loader):
    """Loads a module by `loader`, on first use."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.lock = threading.RLock()
        self.runs = False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _LazyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing yet: see `_load`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _load(module: types.ModuleType) -> None:
    """Run a module's code after its package's, once. Other threads wait; the one that runs it sees what is there."""
    spec = object.__getattribute__(module, "__spec__")
    lazy = spec.loader
    if not isinstance(lazy, _LazyLoader):
        return
    package = sys.modules.get(spec.name.rpartition(".")[0])
    if isinstance(package, _LazyModule) and not lazy.runs:
        _load(package)  # before the lock is held: a package may load its modules
    with lazy.lock:
        if lazy.runs or spec.loader is not lazy:
            return
        lazy.runs = True
        try:
            lazy.loader.exec_module(module)
        except AttributeError as error:
            # Reading a name runs the module: `hasattr` must not take an error within it for a name that is not there.
            raise ImportError(f"{spec.name} cannot be loaded: {error}", name=spec.name) from error
        finally:
            lazy.runs = False
        spec.loader = lazy.loader
        module.__loader__ = lazy.loader
        object.__setattr__(module, "__class__", types.ModuleType)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the farm's modules where Python does, and has them loaded on first use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("farm."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyLoader(spec.loader)
        return spec


def install() -> None:
    """Have the farm's modules loaded on first use from now on in this process. A second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
