"""Install a wheel without the checkout in reach, and use it as a new user does.

`check.py dist/tvm_farm-*.whl [--quick]`, in the environment that has the third-party packages: a virtual environment of
the wheel's own borrows them, so that nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence

# Tuning begins TVM, Ray and a virtual board; a machine that does other things takes five times the usual.
_TIMEOUT_S = 400.0
_RESOURCES = (
    "from farm.provision import bundle_build, layout; import pathlib, farm, farm.search\n"
    "for name in layout._PLACES: layout.read_resource(name)\n"
    "bundle_build.pack_agent(bundle_build.find_agent_source(), pathlib.Path('.'))\n"
    "assert set(farm.__all__) | set(farm.search.__all__)\n"
    "print(farm.__file__)"
)


class Installed:
    """A wheel in a virtual environment below `folder`, with a FARM_HOME and a working folder of its own."""

    def __init__(self, wheel: pathlib.Path, folder: pathlib.Path) -> None:
        self.environment_path, self.work = folder / "environment", folder / "work"
        self.work.mkdir()
        (folder / "t").mkdir()
        self.environment = {key: value for key, value in os.environ.items() if key[:5] not in ("FARM_", "PYTHO")} | {
            "FARM_HOME": str(folder / "home"),
            # What Zig makes on first use may come from elsewhere: it is no part of a wheel.
            "FARM_ZIG_CACHE": os.environ.get("FARM_ZIG_CACHE", str(folder / "zig")),
            "TMPDIR": str(folder / "t"),
        }
        self._call([sys.executable, "-m", "venv", "--without-pip", str(self.environment_path)])
        python = str(self.environment_path / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
        self._call([*pip, "--disable-pip-version-check", str(wheel.resolve())])
        # After the wheel, so that pip takes no other tvm-farm for the one that is there.
        packages = pathlib.Path(self._call([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
        (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def farm(self, *words: str) -> str:
        """Run `farm`; return its stdout. Raises SystemExit with its output where it fails."""
        return self._call([str(self.environment_path / "bin" / "farm"), *words])

    def python(self, code: str) -> str:
        """Run a piece of Python likewise."""
        return self._call([str(self.environment_path / "bin" / "python"), "-c", code])

    def _call(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
        return done.stdout.strip()


def check(installed: Installed, version: str, quick: bool) -> None:
    """Use what was installed. Raises SystemExit naming what does not work."""
    _expect(installed.farm("--version") == f"tvm-farm {version}", "the version is another one")
    code = pathlib.Path(installed.python(_RESOURCES))
    _expect(installed.environment_path in code.parents, f"the farm that was run is not the wheel's: {code}")
    installed.farm("init", "--virtual", "2", "--board-type", "jetson-nano", "--out", "rack")
    installed.farm("fleet", "apply", "rack/fleet.yaml")
    names = [board["name"] for board in json.loads(installed.farm("board", "list", "--json"))]
    _expect(len(names) == 2, f"there should be two boards, not {names}")
    installed.farm("campaign", "run", "--dry-run", "rack/campaign.yaml")
    if not quick:
        installed.farm("doctor")
    # Through compilers, linker, a board's agent, measuring, verification and the store.
    tuned = json.loads(installed.farm("tune", "mlp", "--board", names[0], "--trials", "3", "--json"))
    _expect(tuned["trials"]["ok"] == 3, f"trials failed: {tuned['trials']}")
    _expect(tuned["records"]["new"] > 0, "no record was written")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(otherwise)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="without `farm doctor`")
    options = parser.parse_args()
    # Short: Ray's sockets lie below it, and a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="fw-", dir="/tmp") as folder:
        check(Installed(options.wheel, pathlib.Path(folder)), options.wheel.name.split("-")[1], options.quick)
    print(f"{options.wheel} works where it is installed")


if __name__ == "__main__":
    main()
