"""Pack a verified artifact into one file (a tar, a wheel or a C package), or deploy it as a Python package on a board.

Equal artifacts give equal files. A deployed package needs the board's TVM runtime and no installer. Each version has a
folder below the login's home; a link with the package's name points to the current one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import io
import keyword
import os
import posixpath
import re
import shlex
import sys
import tarfile
import tempfile
import zipfile
from importlib import resources
from pathlib import Path

from device_agent.protocol import load_json
from device_agent.protocol.interpreters import folder_command
from farm.artifacts import artifact_folder, c_package
from farm.artifacts import manifest as manifests
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.checking import require_verified
from farm.artifacts.manifest import Manifest
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_files import put
from farm.errors import PermanentError, UsageError
from farm.gpu import code
from farm.provision.layout import HOME_PREFIX, MODELS_FOLDER, ROOT_PREFIX
from farm.provision.wheels import pack_wheel

TAR, WHEEL, C = "tar", "wheel", "c"
FORMATS = (TAR, WHEEL, C)
_ENDINGS = {TAR: "tar", WHEEL: "whl", C: "tar"}
# A path with such an ending is a file.
_ARCHIVES = frozenset({".tar", ".whl", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".zip"})
# Where a package has its manifest, and the largest size to read.
_MANIFEST, _MOST_MANIFEST = rf"[^/]+/{re.escape(manifests.NAME)}", 16 << 20
# The code in a wheel that runs the model.
_RUNTIME = "farm.artifacts.runtime"
_RUNTIME_FILES = ("__init__.py", "__main__.py", "inputs.py", "runner.py", "tasks.py")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Optional requirements of a wheel, which may not be installed here.
_OPTIONAL = frozenset({"pillow"})
# Part of the summary of every wheel made here.
_MADE = "by tvm-farm"
# For a short command on the board.
_COMMAND_TIMEOUT_S = 15.0


def write_package(
    artifact: Artifact, form: str, out: Path | str | None, name: str | None = None, runtime: Path | None = None
) -> Path:
    """Write the package and return its path. `out` is a file with the right ending, or a folder, created if missing.

    It replaces only the same kind of package of the same model and board type. `runtime` is where a C package for
    another CPU finds TVM's libraries: a bundle, or a folder with wheels or libraries. A tar and a wheel with GPU code
    include TVM's plug-in. Raises UsageError for an invalid package name or an occupied path, PermanentError for an
    unverified artifact.
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format {form!r}", f"Known: {', '.join(FORMATS)}.")
    if form == C:
        artifact_folder.require_cpu(artifact.manifest, "a C package")
        if lengths := artifact.manifest.lengths:
            raise UsageError(
                f"{artifact.manifest.name} is compiled for a range of {lengths.name}, and a C package takes one length",
                f"Compile one with --shape {lengths.name}={lengths.sizes[-1].size}; wheels and tars take a range.",
            )
    require_verified(artifact)
    package = require_name(name) if name is not None else find_name(artifact.manifest.name)
    root = _plan_name(package, artifact.manifest, form)
    path = _find_path(out, f"{root}.{_ENDINGS[form]}", form)
    _require_own(path, form, artifact.manifest)
    if form == WHEEL:
        contents, record = _plan_wheel(package, artifact)
    elif form == C:
        contents = c_package.build(artifact, runtime)
    else:
        contents = _read_files(artifact)
    with artifact_folder.new_file(path) as partial:
        if form == WHEEL:
            pack_wheel(partial, contents, record)
        else:
            with tarfile.open(partial, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for name, data in sorted(contents.items()):
                    entry = tarfile.TarInfo(f"{root}/{name}")
                    entry.size, entry.mtime = len(data), int(artifact.manifest.created_at)
                    entry.mode = 0o755 if data.startswith(b"\x7fELF") else 0o644
                    archive.addfile(entry, io.BytesIO(data))
    return path


def list_members(artifact: Artifact) -> dict[str, bytes]:
    """Return the files of the Python package that runs an artifact, including the artifact's own."""
    programs = {name: resources.files(_RUNTIME).joinpath(name).read_bytes() for name in _RUNTIME_FILES}
    return programs | _read_files(artifact)


def _read_files(artifact: Artifact) -> dict[str, bytes]:
    manifest = artifact.manifest
    files = {each: artifact.read_file(each) for each in manifest.files} | {manifests.NAME: manifest.to_json().encode()}
    if manifest.gpu is None:
        return files
    # The plug-in that TVM's runtime needs for GPU code; on virtual boards also the driver.
    return files | code.read_files(manifest.link_triple, simulated=manifest.simulated)


def find_name(model: str) -> str:
    """Return a Python package name for a model: `squeezenet1_1` for squeezenet1.1, `model_json` for json."""
    words = _to_words(model)
    return words if _is_name(words) and not find_clash(words) else f"model_{words}".rstrip("_")


def explain_name(model: str) -> str:
    """Say why a model's package has another name than the model; "" where it has not."""
    words = _to_words(model)
    clash = find_clash(words) if words else ""
    return clash and f"the package is called {find_name(model)}: {clash}; --name chooses another name"


def require_name(name: str) -> str:
    """Raise UsageError unless Python can import a package of this name and none has it."""
    if not _is_name(name):
        raise UsageError(f"--name {name!r} is no name that Python imports", "Use letters, digits and underscores.")
    if clash := find_clash(name):
        raise UsageError(f"--name {name!r} is taken: {clash}", "Choose another name.")
    return name


def find_clash(name: str) -> str:
    """Describe what else has a package's name; "" for nothing.

    TVM, NumPy and their requirements are installed here. Packages of other models do not count: they are replaced.
    """
    if name in sys.stdlib_module_names or name == "test":
        return f"{name} is a module of Python's standard library"
    try:
        distribution: importlib.metadata.Distribution | None = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    if name in _OPTIONAL or (distribution is not None and _MADE not in (distribution.metadata["Summary"] or "")):
        return f"pip installs another package as {name}"
    spec = importlib.util.find_spec(name) if distribution is None else None
    return f"{name} is an installed module of Python" if spec is not None and spec.origin else ""


def _to_words(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", model).strip("_").lower()


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and not keyword.iskeyword(name)


def find_version(manifest: Manifest) -> str:
    """Return a version that identifies a model's package by board type and library."""
    kind = re.sub(r"[^a-z0-9]+", ".", manifest.board_type.lower()).strip(".")
    return f"1.0+{kind}.{manifest.code_sha256[:8]}"


def find_tag(manifest: Manifest) -> str:
    """Return the wheel's platform tag: a library linked for a known glibc runs with that or a later one."""
    found = re.fullmatch(r"[a-z0-9_]+-linux-gnu\.(\d+)\.(\d+)(\.\d+)?", manifest.link_triple or "")
    system = f"manylinux_{found[1]}_{found[2]}" if found else "linux"
    return f"py3-none-{system}_{manifest.architecture}"


def _find_path(out: Path | str | None, called: str, form: str) -> Path:
    path, ending = Path(out or "."), _ENDINGS[form]
    is_folder = path.is_dir() or str(out).endswith(os.sep) or path.suffix.lower() not in _ARCHIVES
    if is_folder:
        return path / called
    if path.suffix != f".{ending}":
        raise UsageError(f"{path} is no name of such a package", f"It ends in .{ending}; or give a folder with --out.")
    if form == WHEEL and path.name != called and path.name.count("-") < 4:
        # pip requires a wheel's name to match its contents.
        raise UsageError(
            f"pip does not install a wheel called {path.name}", f"Give a folder with --out: the wheel is {called}."
        )
    return path


def _require_own(path: Path, form: str, manifest: Manifest) -> None:
    """Raise UsageError where the path is occupied by anything but an earlier package of this kind."""
    if blocking := [each for each in path.parents if each.exists() and not each.is_dir()]:
        raise UsageError(f"{blocking[0]} is a file", "Give another folder with --out.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "Move it away, or give another place with --out.")
    if path.exists() and _find_kind(path) != (form, manifest.name, manifest.board_type):
        raise UsageError(
            f"{path} is there already, and is no {form} package of {manifest.name} for {manifest.board_type}",
            "Give another name with --out, or remove it.",
        )


def _find_kind(path: Path) -> tuple[str, str, str] | None:
    """Return format, model and board type of a package; None for other files."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                (name,) = [each for each in archive.namelist() if re.fullmatch(_MANIFEST, each)]
                with archive.open(name) as file:
                    return WHEEL, *_read_kind(file.read(_MOST_MANIFEST))
        with tarfile.open(path, "r:") as tar:
            names = tar.getnames()
            (name,) = [each for each in names if re.fullmatch(_MANIFEST, each)]
            form = C if any(each.endswith(f"/lib/{manifests.LIBRARY}") for each in names) else TAR
            member = tar.extractfile(name)
            return (form, *_read_kind(member.read(_MOST_MANIFEST))) if member else None
    except (OSError, ValueError, LookupError, TypeError, tarfile.TarError, zipfile.BadZipFile):
        return None


def _read_kind(text: bytes) -> tuple[str, str]:
    document = load_json(text.decode())
    return str(document["name"]), str(document["board_type"])


def _plan_name(package: str, manifest: Manifest, form: str) -> str:
    if form == WHEEL:
        return f"{package}-{find_version(manifest)}-{find_tag(manifest)}"
    return f"{package}-{'c-' if form == C else ''}{manifest.board_type}-{manifest.code_sha256[:8]}"


def _plan_wheel(package: str, artifact: Artifact) -> tuple[dict[str, bytes], str]:
    """Return a wheel's contents without the RECORD, and the RECORD's name."""
    manifest = artifact.manifest
    version, tag = find_version(manifest), find_tag(manifest)
    info = f"{package}-{version}.dist-info"
    members = {f"{package}/{name}": data for name, data in list_members(artifact).items()}
    members[f"{info}/METADATA"] = _describe(package, version, manifest).encode()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tvm-farm\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    return members, f"{info}/RECORD"


def _describe(package: str, version: str, manifest: Manifest) -> str:
    versions = manifest.versions
    takes, gives = (", ".join(map(str, each)) for each in (manifest.inputs, manifest.outputs))
    where = f"the GPU of {manifest.board_type}" if manifest.gpu else manifest.board_type
    # Pillow is required only for reading images.
    return f"""Metadata-Version: 2.1
Name: {package}
Version: {version}
Summary: {manifest.name}, compiled for {where} {_MADE} {versions["tvm-farm"]}
Requires-Python: >=3.10
Requires-Dist: apache-tvm=={versions["apache-tvm"]}
Requires-Dist: apache-tvm-ffi=={versions["apache-tvm-ffi"]}
Requires-Dist: numpy>=2
Provides-Extra: images
Requires-Dist: pillow>=9.1; extra == "images"

Takes {takes}; gives {gives}.

    from {package} import Model
    outputs = Model().run({{"{manifest.inputs[0].name if manifest.inputs else ""}": array}})
"""


@dataclasses.dataclass(frozen=True)
class Deployed:
    """The deployed package: add `folder` to Python's path, or run `command`.

    The command names the package's folder, since `python -m` searches the current folder first. Of `bytes`,
    `sent_bytes` crossed the network; None for a board on this machine.
    """

    package: str
    folder: str
    command: str
    bytes: int
    sent_bytes: int | None


def deploy_here(artifact: Artifact, folder: Path) -> Deployed:
    """Deploy to a board on this machine. Raises PermanentError for an unverified artifact."""
    require_verified(artifact)
    package, members = find_name(artifact.manifest.name), list_members(artifact)
    with artifact_folder.new_folder(folder / package) as partial:
        for name, data in members.items():
            (partial / name).write_bytes(data)
    command = shlex.join(folder_command(str(folder / package)))
    return Deployed(package, str(folder), command, sum(map(len, members.values())), None)


def deploy_over_ssh(artifact: Artifact, connection: SshConnection, home: str = ".") -> Deployed:
    """Deploy to a remote board; send only missing files, and switch to the new package once it is complete.

    Raises PermanentError, TransientError, DeadlineError, BoardLostError.
    """
    require_verified(artifact)
    package, members = find_name(artifact.manifest.name), list_members(artifact)
    folder = posixpath.join(home, MODELS_FOLDER)
    versions = posixpath.join(folder, ".versions")
    version = posixpath.join(versions, f"{package}-{artifact.manifest.code_sha256[:12]}")
    _require(connection, f"mkdir -p {shlex.quote(version)}")
    sent = 0
    with tempfile.TemporaryDirectory(prefix="farm-deploy-") as local:
        for name, data in members.items():
            path = Path(local) / name
            path.write_bytes(data)
            moved = put(connection, path, posixpath.join(version, name))
            sent += moved.size if moved.moved else 0
    link = posixpath.join(folder, package)
    target = posixpath.relpath(version, folder)
    # `ln -sfn` unlinks first, which would leave a moment without a link.
    _require(
        connection,
        f"ln -sfn {shlex.quote(target)} {shlex.quote(link)}.new && mv -T {shlex.quote(link)}.new {shlex.quote(link)}",
    )
    where = _require(connection, f"cd {shlex.quote(folder)} && pwd").strip()
    command = f"{_find_python(connection)} {shlex.quote(posixpath.join(where, package))}"
    return Deployed(package, where, command, sum(map(len, members.values())), sent)


def _find_python(connection: SshConnection) -> str:
    """Return the provisioned interpreter with TVM's runtime, else python3."""
    artifact_folder = [f"{ROOT_PREFIX}/current/bin/python", f'"$HOME"/{HOME_PREFIX}/current/bin/python']
    found = _require(
        connection,
        f'for p in {" ".join(artifact_folder)}; do if [ -x "$p" ]; then echo "$p"; exit; fi; done; echo python3',
    )
    return shlex.quote(found.strip())


def _require(connection: SshConnection, command: str) -> str:
    done = connection.exec(command, _COMMAND_TIMEOUT_S)
    if done.code:
        said = done.err.decode(errors="replace").strip().splitlines()
        raise PermanentError(f"{connection.address} refuses: {said[-1] if said else f'exit code {done.code}'}")
    return done.out.decode(errors="replace")
