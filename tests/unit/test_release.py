"""What a release is made of: its checks and its notes."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests import release_scripts

ROOT = pathlib.Path(__file__).resolve().parents[2]


release = release_scripts.load("release")


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    files = {
        "pyproject.toml": 'version = "0.3.0"\n',
        "farm/version.py": '__version__ = "0.3.0"\n',
        "device_agent/__init__.py": '__version__ = "0.3.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [0.3.0]\n### Added\n- It.\n\n## [0.2.0]\n- Before.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    return tmp_path


def test_what_is_in_order_may_be_released(checkout: pathlib.Path) -> None:
    """Nothing is wrong, and the notes are the version's own part of the changelog."""
    assert release.find_faults(checkout, "0.3.0") == []
    assert release.read_notes((checkout / "CHANGELOG.md").read_text(), "0.3.0") == "### Added\n- It."


def test_everything_in_the_way_is_named_at_once(checkout: pathlib.Path) -> None:
    """Another version anywhere, no changes told, files not committed, a tag that is there."""
    (checkout / "new").touch()
    subprocess.run(["git", "-C", str(checkout), "tag", "v0.4.0"], check=True, timeout=60)
    said = "\n".join(release.find_faults(checkout, "0.4.0"))
    for part in (
        "pyproject.toml says 0.3.0",
        "farm/version.py",
        "device_agent",
        "CHANGELOG",
        "not clean: new",
        "v0.4.0",
    ):
        assert part in said
    with pytest.raises(SystemExit, match="cannot be released"):
        release.release(checkout, "0.4.0", dry_run=True)
    assert not (checkout / "dist").exists()


def test_a_dry_run_makes_all_but_the_tag(checkout: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes and checksums lie beside what was built; the tag is made only without --dry-run."""

    def build(root: pathlib.Path, *command: str) -> None:
        # Building and trying a wheel is what tests/acceptance/test_wheel.py does.
        (root / "dist").mkdir(exist_ok=True)
        (root / "dist" / "tvm_farm-0.3.0-py3-none-any.whl").touch()

    monkeypatch.setattr(release, "_run", build)
    (checkout / ".git" / "info" / "exclude").write_text("/dist/\n")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "a")
    monkeypatch.setenv("GIT_COMMITTER_EMAIL", "a@example.com")
    tags = ["git", "-C", str(checkout), "tag", "--list"]
    release.release(checkout, "0.3.0", dry_run=True)
    assert (checkout / "dist" / "NOTES.md").read_text() == "# tvm-farm 0.3.0\n\n### Added\n- It.\n"
    assert "tvm_farm-0.3.0-py3-none-any.whl" in (checkout / "dist" / "SHA256SUMS").read_text()
    assert subprocess.run(tags, check=True, capture_output=True, text=True, timeout=60).stdout == ""
    release.release(checkout, "0.3.0", dry_run=False)
    assert subprocess.run(tags, check=True, capture_output=True, text=True, timeout=60).stdout == "v0.3.0\n"
