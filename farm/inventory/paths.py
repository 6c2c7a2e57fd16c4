"""Find the inventory's data files, in a checkout and in an installed wheel alike. Reading them is not done here."""

from __future__ import annotations

import pathlib

from farm import errors


def require_inventory_folder() -> pathlib.Path:
    """The folder that holds `board_types/` and the example fleets.

    A wheel carries the data beside this module (see `tool.hatch` in pyproject.toml); a checkout keeps it at the top.
    Raises UnavailableError when neither is there, which means a broken installation.
    """
    here = pathlib.Path(__file__).resolve().parent
    candidates = (here / "data", here.parents[1] / "inventory")
    for folder in candidates:
        if (folder / "board_types").is_dir():
            return folder
    raise errors.UnavailableError(
        f"the inventory's data is missing; looked in {' and '.join(map(str, candidates))}",
        "install tvm-farm again, or run from a complete checkout",
    )
