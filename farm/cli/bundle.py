"""`farm board bundle`: build the file that provisions boards, also without a network."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.cli import output, tables
from farm.errors import UsageError
from farm.inventory import board_types
from farm.provision import bundle as provision_bundle
from farm.provision import bundle_build, interpreters


@output.command
def bundle(
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="aarch64|x86_64", help="Architecture of the board.")
    ] = None,
    board_type: Annotated[
        str | None, typer.Option("--board-type", metavar="TYPE", help="Board type whose architecture it is.")
    ] = None,
    python: Annotated[
        list[str] | None, typer.Option("--python", metavar="3.11", help="Python version of the boards; repeatable.")
    ] = None,
    managed_python: Annotated[
        bool,
        typer.Option("--managed-python", help="Bring a Python along, fetched by uv, for boards with an older one."),
    ] = False,
    python_archive: Annotated[
        Path | None,
        typer.Option("--python-archive", metavar="FILE", help="Archive of python-build-standalone to bring along."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="File or folder to write; default: a name made up here."),
    ] = None,
) -> output.Document:
    """Fetch and pack what boards of one machine need. Equal inputs give equal files."""
    farm_settings.load().share_linker_cache()
    if (arch is None) == (board_type is None):
        raise UsageError("say what the bundle is for", "Give --arch aarch64, --arch x86_64, or --board-type TYPE.")
    machine = arch or _find_arch(board_type or "")
    # A bundle with its own interpreter serves every board; else it is for the commonest Python.
    pythons = tuple(dict.fromkeys(python or (() if python_archive else (interpreters.MANAGED_PYTHON,))))
    recipe = bundle_build.BundleRecipe(machine, pythons, managed_python and python_archive is None, python_archive)
    called = f"tvm-farm-{machine}-{'-'.join(pythons) or 'python'}.tar"
    path = Path(called) if out is None else out / called if out.is_dir() else out
    artifact_folder.require_room(path.parent)
    made = bundle_build.build_bundle(recipe, path.absolute(), lambda text: output.stderr.print(text, markup=False))
    yield from _tell(made)


def _find_arch(name: str) -> str:
    """Return the machine of a board type; ours where it is this machine."""
    target = board_types.require_board_type(name).target
    return target.mtriple.partition("-")[0] if target else platform.machine()


def _tell(bundle: provision_bundle.Bundle) -> output.Document:
    manifest = bundle.manifest
    yield {
        "path": str(bundle.path),
        "bytes": bundle.size,
        "key": manifest.key,
        "version": manifest.version,
        "arch": manifest.arch,
        "pythons": list(manifest.pythons),
        "managed_python": manifest.managed_python or None,
        "unpacked_bytes": manifest.unpacked_bytes,
        "files": dict(manifest.files),
    }
    facts = {
        "Bundle": f"{bundle.path}, {bundle.size / 1e6:.0f} MB",
        "Version": manifest.key,
        "For": f"{manifest.arch}, Python {' or '.join(manifest.pythons)}",
        "Brings": manifest.managed_python or "no Python: the board's own is used",
        "Installed": f"{manifest.unpacked_bytes / 1e6:.0f} MB and its bytecode",
    }
    tables.print_facts(facts)
    tables.print_table(("File", "SHA-256"), [(name, sha256) for name, sha256 in manifest.files.items()], left=(0, 1))
