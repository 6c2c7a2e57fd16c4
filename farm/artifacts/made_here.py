"""The artifacts that this machine made: a note of each folder in FARM_HOME, for the page that lists them.

The artifact itself, its manifest included, lies where the user wanted it, and may be moved or removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from farm.artifacts.manifest import Artifact, open_artifact
from farm.errors import UsageError
from farm.folders import make_private

_FOLDER = "artifacts"


def note_artifact(home: Path, artifact: Artifact) -> None:
    """Remember where an artifact lies. A home that takes no note costs only the note."""
    path = str(artifact.folder.absolute())
    with contextlib.suppress(OSError):
        make_private(home / _FOLDER)
        (home / _FOLDER / hashlib.sha256(path.encode()).hexdigest()[:32]).write_text(path, encoding="utf-8")


def list_made_here(home: Path) -> list[Artifact]:
    """The artifacts that are still where they were made, the newest first. Notes of others are removed."""
    found = []
    notes = home / _FOLDER
    for note in sorted(notes.iterdir()) if notes.is_dir() else ():
        try:
            found.append(open_artifact(Path(note.read_text(encoding="utf-8"))))
        except (OSError, UnicodeDecodeError):
            continue
        except UsageError:
            with contextlib.suppress(OSError):
                note.unlink()
    return sorted(found, key=lambda each: -each.manifest.created_at)
