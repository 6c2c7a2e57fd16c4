"""Find the files that a board is given besides Python code: pins, units and the supervisor. A checkout or a wheel."""

from __future__ import annotations

from pathlib import Path

from farm.errors import UnavailableError

# Name -> where a checkout has it; a wheel has all of them in `data/` beside this module (`tool.hatch`).
_PLACES = {
    "agent.txt": "requirements/agent.txt",
    "board-tools.txt": "requirements/board-tools.txt",
    "tvm-farm-agent.service": "deploy/systemd/tvm-farm-agent.service",
    "tvm-farm-clock-helper.service": "deploy/systemd/tvm-farm-clock-helper.service",
    "supervisor.py": "deploy/board/supervisor.py",
}


def read_resource(name: str) -> str:
    """The text of one of the files above. Raises UnavailableError where the installation lacks it."""
    here = Path(__file__).resolve().parent
    for path in (here / "data" / name, here.parents[1] / _PLACES[name]):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise UnavailableError(f"the farm's own file {name} is missing", "Install tvm-farm again, or use a whole checkout.")
