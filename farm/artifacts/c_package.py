"""Package an artifact for C: header, sources, TVM's runtime and the library, with a program built from them.

`c/model.h` documents the sources. The board needs no Python.
"""

from __future__ import annotations

import importlib.metadata
import io
import platform
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from farm import linker
from farm.artifacts import manifest as manifests
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.manifest import Manifest, Tensor
from farm.errors import UnavailableError, UsageError
from farm.provision.bundle import open_bundle

# TVM's runtime without Python; the program loads the model's library.
_RUNTIME = ("libtvm_ffi.so", "libtvm_runtime.so")
_HEADERS = ("tvm/ffi/c_api.h", "dlpack/dlpack.h")
_SOURCES = ("model.h", "model.c", "main.c")
# ELF's machine numbers of boards (elf.h).
_MACHINES = {62: "x86_64", 183: "aarch64"}
_MOST_DIMENSIONS = 16


def build(artifact: Artifact, runtime: Path | None) -> dict[str, bytes]:
    """Build the package's files. Raises UsageError, UnavailableError without TVM's runtime for the board."""
    manifest = artifact.manifest
    contents = {f"lib/{name}": data for name, data in _find_runtime(manifest, runtime).items()}
    values = _make_values(manifest)
    for name in _SOURCES:
        text = resources.files("farm.artifacts").joinpath("c", name).read_text(encoding="utf-8")
        contents[f"src/{name}"] = re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], text).encode()
    headers = linker.find_package("tvm_ffi") / "include"
    contents |= {f"include/{name}": (headers / name).read_bytes() for name in _HEADERS}
    contents |= _list_licences()
    contents["README.md"] = _explain(manifest).encode()
    contents["bin/main"] = _compile(contents, manifest.link_triple)
    for name in manifest.files:
        contents[f"lib/{name}"] = artifact.read_file(name)
    contents[manifests.NAME] = manifest.to_json().encode()
    return contents


def _compile(contents: Mapping[str, bytes], triple: str | None) -> bytes:
    with tempfile.TemporaryDirectory(prefix="farm-c-") as folder:
        root = Path(folder)
        for name, data in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        output = root / "main"
        linker.link_program(output, [root / "src" / "main.c", root / "src" / "model.c"], triple, _options(root))
        return output.read_bytes()


def _options(root: Path) -> list[str]:
    """Return compiler options; `no-as-needed` keeps the runtime library, which no symbol refers to."""
    return [
        "-I",
        str(root / "include"),
        "-L",
        str(root / "lib"),
        "-Wl,--no-as-needed",
        "-ltvm_ffi",
        "-ltvm_runtime",
        "-Wl,--allow-shlib-undefined",
        "-Wl,-rpath,$ORIGIN/../lib",
    ]


def _explain(manifest: Manifest) -> str:
    takes, gives = ("\n".join(f"- {each}" for each in several) for several in (manifest.inputs, manifest.outputs))
    return f"""# {manifest.name} for {manifest.board_type}, in C

`bin/main lib/model.so INPUT... OUTPUT...` runs the model on files of raw numbers. `src/model.h` is the interface for
programs of your own, `src/main.c` shows its use:

    cc -I include src/main.c src/model.c -L lib -Wl,--no-as-needed -ltvm_ffi -ltvm_runtime -Wl,-rpath,'$ORIGIN/../lib'

Inputs, in order:
{takes}

Outputs, in order:
{gives}

`lib/libtvm_*.so` are Apache TVM {manifest.versions["apache-tvm"]}'s runtime and `include/` its headers, under the
Apache License 2.0. They need libstdc++ and glibc 2.27 or later.
"""


def _make_values(manifest: Manifest) -> dict[str, str]:
    """Return the values of the placeholders in the sources."""
    defines = [
        f"#define MODEL_INPUTS {len(manifest.inputs)}",
        f"#define MODEL_OUTPUTS {len(manifest.outputs)}",
        f"#define MODEL_THREADS {manifest.threads}",
    ]
    # A name may hold anything, even the end of a comment.
    for word, tensors in (("Input", manifest.inputs), ("Output", manifest.outputs)):
        for index, tensor in enumerate(tensors):
            called = re.sub(r"[^A-Za-z0-9_.:/ -]|/(?=\*)|\*(?=/)", "_", tensor.name)
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            defines.append(f"/* {word} {index}: {called}, {shape} {tensor.dtype}, {tensor.size_bytes} bytes */")
    return {
        "DEFINES": "\n".join(defines),
        "INPUTS": ", ".join(map(_describe, manifest.inputs)),
        "INPUT_BYTES": ", ".join(str(each.size_bytes) for each in manifest.inputs),
        "OUTPUT_BYTES": ", ".join(str(each.size_bytes) for each in manifest.outputs),
    }


def _describe(tensor: Tensor) -> str:
    if len(tensor.shape) > _MOST_DIMENSIONS:
        raise UsageError(f"{tensor} has more than {_MOST_DIMENSIONS} dimensions, which the C interface does not take")
    dtype = np.dtype(tensor.dtype)
    shape = ", ".join(map(str, tensor.shape)) or "0"
    return f'{{"{dtype.kind}", {8 * dtype.itemsize}, {len(tensor.shape)}, {{{shape}}}}}'


def _find_runtime(manifest: Manifest, place: Path | None) -> dict[str, bytes]:
    """Find TVM's libraries for the artifact's CPU: this machine's, or those in `place`."""
    wanted = manifest.architecture
    if place is None and wanted != platform.machine():
        raise UnavailableError(
            f"a C package for {wanted} needs TVM's runtime for it, and this machine is {platform.machine()}",
            f"`farm board bundle --arch {wanted} --out BUNDLE.tar` fetches it; then --runtime BUNDLE.tar.",
        )
    found: dict[str, bytes] = {}
    for name, data in _list_own() if place is None else _list_libraries(place):
        machine = _MACHINES.get(int.from_bytes(data[18:20], "little"))
        if data.startswith(b"\x7fELF") and machine == wanted:
            found.setdefault(name, data)
    if missing := [name for name in _RUNTIME if name not in found]:
        raise UsageError(
            f"{place or 'this installation'} has no {', '.join(missing)} for {wanted}",
            "Give --runtime a bundle for that board type, or a folder with TVM's wheels or libraries.",
        )
    return found


def _list_own() -> Iterator[tuple[str, bytes]]:
    for package, name in zip(("tvm_ffi", "tvm"), _RUNTIME, strict=True):
        path = linker.find_package(package) / "lib" / name
        if path.is_file():
            yield name, path.read_bytes()


def _list_libraries(place: Path) -> Iterator[tuple[str, bytes]]:
    """Yield files named like TVM's libraries in a bundle, or in a folder and its wheels."""
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            if path.name in _RUNTIME and path.is_file():
                yield path.name, path.read_bytes()
            elif path.name.startswith("apache_tvm") and path.suffix == ".whl":
                yield from _list_wheel(path.read_bytes())
        return
    open_bundle(place)
    with tarfile.open(place, "r:") as archive:
        for member in archive:
            if re.search(r"(^|/)apache_tvm[^/]*\.whl$", member.name) and (file := archive.extractfile(member)):
                yield from _list_wheel(file.read())


def _list_wheel(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if (last := name.rpartition("/")[2]) in _RUNTIME:
                yield last, archive.read(name)


def _list_licences() -> dict[str, bytes]:
    """Return TVM's licence and notice, which must accompany its libraries."""
    files = [
        (f"licences/{name}/{path.name}", path.locate())
        for name in ("apache-tvm", "apache-tvm-ffi")
        for path in importlib.metadata.files(name) or ()
        if path.name in ("LICENSE", "NOTICE") and (".dist-info" in path.parts[0] or len(path.parts) == 2)
    ]
    return {name: Path(str(path)).read_bytes() for name, path in files}
