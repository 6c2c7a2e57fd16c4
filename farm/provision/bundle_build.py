"""Build bundles: fetch and pack what a board of one machine and one Python needs, and cache them.

Runs on the coordinator. `bundle.py` defines the format.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import device_agent.protocol
from farm.errors import UnavailableError, UsageError
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.inventory.documents import require_inventory_folder
from farm.provision import interpreters, wheels
from farm.provision.bundle import Bundle, BundleManifest, open_bundle, write_bundle
from farm.provision.layout import read_resource
from farm.provision.wheels import pack_wheel

NAME = "tvm-farm"
_VERSION = re.compile(r'(?m)^__version__ = "([A-Za-z0-9.+_-]+)"$')
# A board's agent reads the same variable (device_agent/board_types.py): the user's types are included.
_EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"

# A board's files beside Python code, as named in a bundle.
SERVICE_FILES = ("tvm-farm-agent.service", "tvm-farm-clock-helper.service", "supervisor.py")


def find_agent_source() -> Path:
    """The folder of this farm's package `device_agent`."""
    return Path(device_agent.protocol.__file__).resolve().parents[1]


def read_agent_version(source: Path) -> str:
    """The version of the agent in `source`. Raises UnavailableError."""
    try:
        found = _VERSION.search((source / "__init__.py").read_text(encoding="utf-8"))
    except OSError as error:
        raise UnavailableError(f"the agent's package cannot be read: {error}") from error
    if found is None:
        raise UnavailableError(f"{source} names no version", "Install tvm-farm again, or use a whole checkout.")
    return found[1]


def pack_agent(source: Path, folder: Path, added: Mapping[str, bytes] | None = None, system: str = "any") -> Path:
    """Write the agent's wheel into `folder`; return its path. `added` maps further files to their content; the wheel
    may then be for one `system` only, such as `manylinux_2_27_aarch64`.

    Raises UnavailableError without the sources.
    """
    version = read_agent_version(source)
    contents = {
        f"device_agent/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    contents |= added or {}
    folders = [require_inventory_folder() / "board_types"]
    if extra := os.environ.get(_EXTRA_FOLDER_VARIABLE):
        folders.append(Path(extra).expanduser())
    for types in folders:
        for path in sorted(types.glob("*.yaml")):
            contents[f"farm/inventory/data/board_types/{path.name}"] = path.read_bytes()
    info = f"tvm_farm-{version}.dist-info"
    contents[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: The board's half of tvm-farm\n"
        "Requires-Python: >=3.10\n"
    ).encode()
    pure, tag = "true" if system == "any" else "false", f"py3-none-{system}"
    contents[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tvm-farm\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()
    )
    contents[f"{info}/entry_points.txt"] = b"[console_scripts]\ndevice-agent = device_agent.agent:main\n"
    wheel = folder / f"tvm_farm-{version}-{tag}.whl"
    pack_wheel(wheel, contents, f"{info}/RECORD")
    return wheel


@dataclasses.dataclass(frozen=True)
class BundleRecipe:
    """The parameters of a bundle.

    `pythons`: the series with wheels; `archive`: an interpreter to include, None for none; `managed`: fetch one.
    `source` is the folder of the package `device_agent`.
    """

    arch: str
    pythons: tuple[str, ...]
    managed: bool = False
    archive: Path | None = None
    source: Path = dataclasses.field(default_factory=find_agent_source)

    def compute_key(self) -> str:
        """A short hash over everything that determines the bundle's content."""
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory(prefix="farm-agent-") as folder:
            digest.update(pack_agent(self.source, Path(folder)).read_bytes())
        for name in ("agent.txt", "board-tools.txt", *SERVICE_FILES):
            digest.update(f"{name}\0{read_resource(name)}\0".encode())
        if self.archive:
            digest.update(self.archive.read_bytes())
        digest.update(repr((self.arch, self.pythons, self.managed)).encode())
        if serves_gpus(self.arch):
            digest.update(repr(code.list_tools()).encode())
        return digest.hexdigest()[:16]


def build_bundle(recipe: BundleRecipe, output: Path, note: Callable[[str], None] = lambda text: None) -> Bundle:
    """Build a bundle at `output`, reproducibly.

    Raises UsageError (arch, Python or archive that no board has), UnavailableError (pip, disk, no interpreter),
    TransientError (nothing could be fetched), DeadlineError, PermanentError (the GPU plug-in does not build).
    """
    recipe = _require_sound(recipe)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bundle-", dir=output.parent) as text:
            folder = Path(text)
            managed = _add_interpreter(recipe, folder, note)
            unpacked = _add_wheels(recipe, folder, note)
            place = folder / "uv"
            program = interpreters.fetch_uv(recipe.arch, place)
            (place / "uv.gz").write_bytes(gzip.compress(program.read_bytes(), mtime=0))
            program.unlink()
            for name in SERVICE_FILES:
                (folder / name).write_text(read_resource(name), encoding="utf-8")
            files = {
                path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
            # An interpreter's archive is a third of its unpacked size.
            unpacked += sum(4 * path.stat().st_size for path in (folder / "python").glob("*.tar.*"))
            version = read_agent_version(recipe.source)
            manifest = BundleManifest(version, recipe.arch, recipe.pythons, managed, unpacked, files)
            return write_bundle(folder, manifest, output)
    except OSError as error:
        raise UnavailableError(
            f"the bundle cannot be written: {error}", "Is the disk full, or --output elsewhere?"
        ) from error


def serves_gpus(arch: str) -> bool:
    """Whether boards of some type with this machine have a supported GPU."""
    return any(
        kind.target is not None
        and kind.target.mtriple.partition("-")[0] == arch
        and kind.gpu is not None
        and bool(kind.gpu.cuda)
        for kind in load_board_types().values()
    )


class BundleCache:
    """Bundles of this coordinator: each is built once, by the first thread that asks. Thread-safe."""

    def __init__(
        self, folder: Path, given: Path | None = None, note: Callable[[str], None] = lambda text: None
    ) -> None:
        """`given` is a bundle for every board; otherwise they are built, and cached in `folder`."""
        self._folder = folder
        self._given = given
        self._note = note
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str, bool], Bundle] = {}

    def find(self, arch: str, pythons: Sequence[str]) -> Bundle | None:
        """The bundle that `require` would return, if it exists already; else None.

        Raises UsageError if the given one does not fit such a board.
        """
        if self._given is not None:
            return self.require(arch, pythons)
        path = self._place(_make_recipe(arch, pythons))
        try:
            return open_bundle(path) if path.is_file() else None
        except UsageError:
            return None

    def require(self, arch: str, pythons: Sequence[str]) -> Bundle:
        """A bundle for a board of `arch` with these Pythons, in order of preference, possibly none.

        Raises UsageError if the given one does not fit such a board, and as `build_bundle`.
        """
        with self._lock:
            if self._given is not None:
                key = ("", "", False)
                if key not in self._made:
                    self._made[key] = open_bundle(self._given)
                return _require_fit(self._made[key], arch, pythons)
            recipe = _make_recipe(arch, pythons)
            key = (arch, recipe.pythons[0], recipe.managed)
            if key not in self._made:
                self._made[key] = self._find_or_build(recipe)
            return self._made[key]

    def _place(self, recipe: BundleRecipe) -> Path:
        return self._folder / f"{recipe.arch}-{recipe.pythons[0]}-{recipe.compute_key()}.tar"

    def _find_or_build(self, recipe: BundleRecipe) -> Bundle:
        path = self._place(recipe)
        if path.is_file():
            try:
                return open_bundle(path)
            except UsageError as error:
                self._note(f"making {path.name} anew: {error.message}")
        bundle = build_bundle(recipe, path, self._note)
        for older in self._folder.glob(f"{path.name.rsplit('-', 1)[0]}-*.tar"):  # of the same kind
            if older != path:
                older.unlink(missing_ok=True)
        return bundle


def _make_recipe(arch: str, pythons: Sequence[str]) -> BundleRecipe:
    """A recipe for a board with these Pythons; without any, an interpreter is included."""
    return BundleRecipe(arch, (pythons[0] if pythons else interpreters.MANAGED_PYTHON,), managed=not pythons)


def _require_fit(bundle: Bundle, arch: str, pythons: Sequence[str]) -> Bundle:
    manifest = bundle.manifest
    if manifest.arch != arch:
        raise UsageError(
            f"the bundle {bundle.path.name} is for {manifest.arch}, the board is {arch}",
            "Make one for it: farm board bundle.",
        )
    if not manifest.managed_python and not set(pythons) & set(manifest.pythons):
        has = f"has Python {', '.join(pythons)}" if pythons else "has no Python >= 3.10"
        raise UsageError(
            f"the bundle {bundle.path.name} is for Python {', '.join(manifest.pythons)}, the board {has}",
            "Make one that fits, or one with an interpreter of its own: farm board bundle --python FILE.",
        )
    return bundle


def _require_sound(recipe: BundleRecipe) -> BundleRecipe:
    """Check the recipe and add the archive's Python to its series. Raises UsageError."""
    if recipe.arch not in wheels.ARCHS:
        raise UsageError(f"there are no wheels for {recipe.arch!r}", f"Boards are one of {', '.join(wheels.ARCHS)}.")
    known = [f"3.{minor}" for minor in range(interpreters.LEAST_PYTHON[1], interpreters.LAST_PYTHON[1] + 1)]
    pythons = recipe.pythons
    if recipe.archive is not None:
        if not recipe.archive.is_file():
            raise UsageError(f"there is no file {recipe.archive}")
        interpreter = interpreters.parse_interpreter(recipe.archive)
        if interpreter.arch != recipe.arch:
            raise UsageError(f"{recipe.archive.name} is for {interpreter.arch}, the bundle for {recipe.arch}")
        pythons = tuple(dict.fromkeys((*pythons, interpreter.series)))
    if wrong := [python for python in pythons if python not in known]:
        raise UsageError(f"a board's Python cannot be {wrong[0]}", f"It is one of {', '.join(known)}.")
    return dataclasses.replace(recipe, pythons=pythons)


def _add_interpreter(recipe: BundleRecipe, folder: Path, note: Callable[[str], None]) -> str:
    """Include the interpreter's archive and uv's list with it; return its folder name on boards, or ""."""
    if recipe.archive is None and not recipe.managed:
        return ""
    place = folder / "python"
    place.mkdir()
    archive = recipe.archive
    if archive is None:
        note(f"fetching Python {recipe.pythons[0]} for {recipe.arch}")
        archive = interpreters.fetch_interpreter(recipe.pythons[0], recipe.arch, place)
    interpreter = interpreters.parse_interpreter(archive)
    data = archive.read_bytes()
    (place / interpreter.file_name).write_bytes(data)
    (place / "downloads.json").write_text(interpreter.to_downloads(hashlib.sha256(data).hexdigest()))
    return interpreter.key


def _add_wheels(recipe: BundleRecipe, folder: Path, note: Callable[[str], None]) -> int:
    """Include wheels and requirements for every Python; return the unpacked size of the largest set."""
    place = folder / "wheels"
    place.mkdir()
    if serves_gpus(recipe.arch):
        note(f"building the GPU plug-in for {recipe.arch}")
        glibc = f"2.{wheels.LEAST_GLIBC_MINOR}"
        plugin = code.read_files(f"{recipe.arch}-linux-gnu.{glibc}", simulated=False)
        added = {f"device_agent/native/{name}": data for name, data in plugin.items()}
        agent = pack_agent(recipe.source, place, added, f"manylinux_{glibc.replace('.', '_')}_{recipe.arch}")
    else:
        agent = pack_agent(recipe.source, place)
    largest = 0
    for python in recipe.pythons:
        note(f"fetching wheels for {recipe.arch} and Python {python}")
        chosen = wheels.choose_pins(read_resource("agent.txt"), python, recipe.arch)
        scratch = folder / f".{python}"
        lines, size = [_line(agent)], wheels.unpacked_bytes(agent)
        for wheel in wheels.fetch_wheels(chosen, python, recipe.arch, scratch):
            wheels.slim_wheel(wheel)
            size += wheels.unpacked_bytes(wheel)
            # Several Pythons may share a wheel.
            lines.append(_line(wheel.replace(place / wheel.name)))
        os.rmdir(scratch)  # noqa: PTH106 - fails if pip left something, which it must not
        (folder / f"requirements-{python}.txt").write_text("".join(sorted(lines)))
        largest = max(largest, size)
    return largest


def _line(wheel: Path) -> str:
    """A requirement line for a wheel as packed, TVM's slimmed wheel included."""
    name, version = wheel.name.split("-")[:2]
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
