"""An artifact put on a board over a real OpenSSH server: whole, once, and the one before serves until then."""

from __future__ import annotations

import pathlib
import shlex
import subprocess

import pytest

from farm.artifacts.package import deploy_here, deploy_over_ssh
from farm.connectivity.ssh import SshConnection
from farm.errors import PermanentError
from farm.provision.layout import MODELS_FOLDER
from tests.unit.artifacts import LIBRARY, verified, write


def test_a_package_is_there_once_and_the_latest_serves(connection: SshConnection, tmp_path: pathlib.Path) -> None:
    """The same artifact is not sent twice; another one takes its place under the package's name."""
    home = tmp_path / "home"
    home.mkdir()
    artifact = write(tmp_path / "a", verified=verified())
    done = deploy_over_ssh(artifact, connection, str(home))
    package = home / MODELS_FOLDER / "tiny_cnn"
    assert done.folder == str(home / MODELS_FOLDER)
    assert (package / "model.so").read_bytes() == LIBRARY
    assert done.sent_bytes == done.bytes > len(LIBRARY)
    again = deploy_over_ssh(artifact, connection, str(home))
    assert (again.bytes, again.sent_bytes) == (done.bytes, 0)
    here = deploy_here(artifact, tmp_path / "here")
    assert (here.bytes, here.sent_bytes) == (done.bytes, None)
    newer = b"\x7fELF, and faster"
    deploy_over_ssh(write(tmp_path / "b", newer, verified=verified(newer)), connection, str(home))
    assert (package / "model.so").read_bytes() == newer
    assert [path.name for path in (home / MODELS_FOLDER).iterdir() if not path.name.startswith(".")] == ["tiny_cnn"]


def test_the_printed_command_imports_nothing_from_the_current_folder(
    connection: SshConnection, tmp_path: pathlib.Path
) -> None:
    """The command of either way to deploy runs the package, not modules that lie beside the user's picture."""
    artifact = write(tmp_path / "a", verified=verified())
    beside = tmp_path / "pictures"
    beside.mkdir()
    for name in ("json", "argparse", "numpy", "tiny_cnn"):
        (beside / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")
    (tmp_path / "home").mkdir()
    for done in (
        deploy_here(artifact, tmp_path / "here"),
        deploy_over_ssh(artifact, connection, str(tmp_path / "home")),
    ):
        ran = subprocess.run(
            [*shlex.split(done.command), "--help"], cwd=beside, capture_output=True, text=True, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("usage: python -m tiny_cnn")


def test_what_was_not_verified_is_not_sent(connection: SshConnection, tmp_path: pathlib.Path) -> None:
    """Nothing is made on the board."""
    with pytest.raises(PermanentError, match="never verified"):
        deploy_over_ssh(write(tmp_path / "a"), connection, str(tmp_path / "home"))
    assert not (tmp_path / "home").exists()


def test_a_board_that_refuses_says_why(connection: SshConnection, tmp_path: pathlib.Path) -> None:
    """A folder that cannot be made is the board's refusal, in its words."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PermanentError, match=r"refuses: .*Not a directory"):
        deploy_over_ssh(write(tmp_path / "a", verified=verified()), connection, str(tmp_path / "file"))
