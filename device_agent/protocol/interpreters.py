"""Start Python without the current folder on the child's module path, and TVM without its slowest look-up.

`python -m` and `python -c` search the current folder first: a `json.py` beside a model would run.
"""

from __future__ import annotations

import sys
from typing import Any

# `-P` for Python 3.10: runpy is imported once the folder is off the path.
_WITHOUT_FOLDER = """
import sys
if sys.path[:1] == [""]: del sys.path[0]
_option, _what = sys.argv[1:3]
sys.argv[:3] = ["-c" if _option == "-c" else _what]
if _option == "-c": exec(compile(_what, "<string>", "exec"))
else: import runpy; runpy.run_module(_what, run_name="__main__", alter_sys=True)
"""


def python_command(*arguments: str, has_safe_path: bool = sys.version_info >= (3, 11)) -> list[str]:
    """Return the command that runs this Python with `-m MODULE ...` or `-c CODE ...`.

    The child does not look for modules in its current folder.
    """
    if has_safe_path:
        return [sys.executable, "-P", *arguments]
    return [sys.executable, "-c", _WITHOUT_FOLDER, *arguments]


def folder_command(folder: str) -> list[str]:
    """Return the command that runs `__main__.py` of a folder; the folder takes the place of the current one."""
    return [sys.executable, folder]


def skip_missing_types(core: Any, registry: Any) -> None:
    """Have TVM ask only for types that its library has: for the first failure it reads 28 MB of debug information.

    `core` and `registry` are modules of `tvm_ffi`, before `tvm` is imported.
    """
    find_type, types = core._object_type_key_to_index, set[str]()

    def find_known_type(key: str) -> int | None:
        if key not in types:
            types.update(registry.get_registered_type_keys())
        return find_type(key) if key in types else None

    core._object_type_key_to_index = find_known_type
