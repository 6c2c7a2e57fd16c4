"""Pack a verified artifact into one file: a tar of it, a wheel that installs as a Python package of its own, or C.

Equal artifacts give equal files.
"""

from __future__ import annotations

import io
import keyword
import re
import tarfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from farm.artifacts import c_package, places
from farm.artifacts import manifest as manifests
from farm.artifacts.checking import require_verified
from farm.artifacts.manifest import Artifact, Manifest
from farm.errors import UsageError
from farm.gpu import native
from farm.provision.wheels import pack_wheel

TAR, WHEEL, C = "tar", "wheel", "c"
FORMATS = (TAR, WHEEL, C)
# What runs the model in a wheel.
_RUNTIME = "farm.artifacts.runtime"
_RUNTIME_FILES = ("__init__.py", "__main__.py", "boxes.py", "images.py", "inputs.py", "runner.py", "tasks.py")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def write_package(
    artifact: Artifact, form: str, out: Path | None, name: str | None = None, runtime: Path | None = None
) -> Path:
    """Write the package; returns its path. `out` is a file, or a folder for a file that is named here.

    `runtime` is where a C package for another processor finds TVM's libraries: a bundle, a wheel's folder, a board's.
    Code for GPUs comes with TVM's plug-in for them, in a tar and a wheel.
    Raises UsageError for a name that no Python package can have, PermanentError for an artifact that was not verified.
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format {form!r}", f"Known: {', '.join(FORMATS)}.")
    if form == C:
        manifests.require_cpu(artifact.manifest, "a C package")
    require_verified(artifact)
    package = require_name(name) if name is not None else find_name(artifact.manifest.name)
    if form == WHEEL:
        called, contents, record = _plan_wheel(package, artifact)
    elif form == C:
        root, contents = c_package.build(artifact, package, runtime)
        called = f"{root}.tar"
    else:
        root, contents = _plan_name(package, artifact.manifest), _read_files(artifact)
        called = f"{root}.tar"
    path = _find_path(out, called, form)
    with places.new_file(path) as partial:
        if form == WHEEL:
            pack_wheel(partial, contents, record)
        else:
            _pack_tar(partial, root, contents, int(artifact.manifest.created_at))
    return path


def list_members(artifact: Artifact) -> dict[str, bytes]:
    """The files of the Python package that runs an artifact, the artifact's own among them."""
    programs = {name: resources.files(_RUNTIME).joinpath(name).read_bytes() for name in _RUNTIME_FILES}
    return programs | _read_files(artifact)


def _read_files(artifact: Artifact) -> dict[str, bytes]:
    manifest = artifact.manifest
    files = {each: artifact.read_file(each) for each in manifest.files} | {manifests.NAME: manifest.to_json().encode()}
    if manifest.gpu is None:
        return files
    # What TVM's runtime lacks to run code for GPUs; on virtual boards the driver, too.
    return files | native.read_files(manifest.link_triple, simulated=manifest.simulated)


def find_name(model: str) -> str:
    """A Python package's name for a model: `squeezenet1_1` for squeezenet1.1."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", model).strip("_").lower()
    return words if _is_name(words) else f"model_{words}".rstrip("_")


def require_name(name: str) -> str:
    """Raise UsageError unless Python can import a package of this name."""
    if not _is_name(name):
        raise UsageError(f"--name {name!r} is no name that Python imports", "Use letters, digits and underscores.")
    return name


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and not keyword.iskeyword(name)


def find_version(manifest: Manifest) -> str:
    """A version that tells packages of one model apart: by board type, and by what was compiled."""
    kind = re.sub(r"[^a-z0-9]+", ".", manifest.board_type.lower()).strip(".")
    return f"1.0+{kind}.{manifest.library.sha256[:8]}"


def find_tag(manifest: Manifest) -> str:
    """Where the wheel may be installed: a library linked for a known glibc runs with that or a later one."""
    triple = manifest.link_triple or ""
    found = re.fullmatch(r"[a-z0-9_]+-linux-gnu\.(\d+)\.(\d+)(\.\d+)?", triple)
    system = f"manylinux_{found[1]}_{found[2]}" if found else "linux"
    return f"py3-none-{system}_{manifest.architecture}"


def _find_path(out: Path | None, called: str, form: str) -> Path:
    if out is None or out.is_dir():
        return (out or Path()) / called
    if form == WHEEL and out.name != called:
        if out.suffix == ".whl" and out.name.count("-") >= 4:
            return out
        # pip reads a wheel's name, so it cannot be any.
        raise UsageError(
            f"pip does not install a wheel called {out.name}", f"Give a folder with --out: the wheel is {called}."
        )
    return out


def _plan_name(package: str, manifest: Manifest) -> str:
    return f"{package}-{manifest.board_type}-{manifest.library.sha256[:8]}"


def _pack_tar(path: Path, root: str, contents: Mapping[str, bytes], at: int) -> None:
    with tarfile.open(path, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(contents.items()):
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size, entry.mtime = len(data), at
            entry.mode = 0o755 if data.startswith(b"\x7fELF") else 0o644
            archive.addfile(entry, io.BytesIO(data))


def _plan_wheel(package: str, artifact: Artifact) -> tuple[str, dict[str, bytes], str]:
    """A wheel's name, its contents but for the RECORD, and that one's name."""
    manifest = artifact.manifest
    version, tag = find_version(manifest), find_tag(manifest)
    info = f"{package}-{version}.dist-info"
    members = {f"{package}/{name}": data for name, data in list_members(artifact).items()}
    members[f"{info}/METADATA"] = _describe(package, version, manifest).encode()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tvm-farm\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    return f"{package}-{version}-{tag}.whl", members, f"{info}/RECORD"


def _describe(package: str, version: str, manifest: Manifest) -> str:
    versions = manifest.versions
    takes, gives = (", ".join(map(str, each)) for each in (manifest.inputs, manifest.outputs))
    # Pillow is asked for where an image is read: a product that has arrays does not need it.
    return f"""Metadata-Version: 2.1
Name: {package}
Version: {version}
Summary: {manifest.name}, compiled for {manifest.board_type} by tvm-farm {versions["tvm-farm"]}
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
