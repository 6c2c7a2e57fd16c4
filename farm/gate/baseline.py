"""The baseline's file: which artifact a model is held against, by board type, device and operating point.

The artifacts lie in a folder beside the file, so that both are kept under version control, or in a cache, together.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

from device_agent.protocol import ProtocolError, load_json
from device_agent.protocol.hardware import Name
from farm.artifacts.fields import Moment, Seconds, Sha256
from farm.artifacts.listed import to_name
from farm.artifacts.manifest import Artifact, open_artifact, write_artifact
from farm.artifacts.places import new_file
from farm.errors import PermanentError, UsageError
from farm.inventory.documents import StrictModel, check_document

FORMAT = "tvm-farm baseline"
_FOLDER_SUFFIX = ".artifacts"
_HINT = "`farm gate MODEL --boards TYPE --baseline FILE --write-baseline` makes one."


class BaselineEntry(StrictModel):
    """One model on one board type. `latency_s` is its median when the baseline was made, for people alone."""

    model: str
    board_type: Name
    simulated: bool
    device: str
    operating_point: str
    artifact: str
    library_sha256: Sha256
    latency_s: Seconds
    created_at: Moment

    @property
    def key(self) -> tuple[str, str, bool, str, str]:
        """What it is the baseline of."""
        return self.model, self.board_type, self.simulated, self.device, self.operating_point


class Baseline(StrictModel):
    """The whole file."""

    format: Literal["tvm-farm baseline"] = "tvm-farm baseline"
    version: Literal[1] = 1
    entries: tuple[BaselineEntry, ...] = ()


def read_baseline(path: Path) -> Baseline:
    """Read it. Raises UsageError."""
    try:
        document = load_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no baseline {path}", _HINT) from error
    except (OSError, UnicodeDecodeError, ProtocolError) as error:
        raise UsageError(f"{path} is no baseline: {error}", _HINT) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{path} is no baseline", _HINT)
    return check_document(document, Baseline, path)


def open_entry(path: Path, baseline: Baseline, key: tuple[str, str, bool, str, str]) -> Artifact:
    """The artifact that something is held against.

    Raises UsageError where the baseline has none for it, PermanentError where that is not the artifact of then.
    """
    entry = next((each for each in baseline.entries if each.key == key), None)
    if entry is None:
        model, board_type, simulated, device, point = key
        about = f"{model} on {board_type}{' (simulated)' if simulated else ''}, {device}, at {point}"
        known = "; ".join(f"{each.model} on {each.board_type}" for each in baseline.entries) or "nothing"
        raise UsageError(f"{path} says nothing of {about}", f"It has {known}. {_HINT}")
    folder = (path.parent / entry.artifact).resolve()
    if not folder.is_relative_to(path.parent.resolve()):
        raise UsageError(f"{path}: {entry.artifact!r} leads out of the baseline's folder")
    artifact = open_artifact(folder)
    artifact.require_whole()
    if artifact.manifest.library.sha256 != entry.library_sha256:
        raise PermanentError(f"{folder} is not the artifact that {path} was made with", "Make the baseline anew.")
    return artifact


def keep(path: Path, artifact: Artifact, point: str, latency_s: float) -> BaselineEntry:
    """Make an artifact what its model is held against, in place of another one; the file's other entries stay."""
    manifest = artifact.manifest
    name = to_name(manifest.name, f"{manifest.board_type}-{manifest.device}{'-simulated' * manifest.simulated}")
    place = Path(f"{path.stem}{_FOLDER_SUFFIX}") / (name if point == "default" else f"{name}-{_to_word(point)}")
    write_artifact(path.parent / place, manifest, {each: artifact.read_file(each) for each in manifest.files})
    entry = BaselineEntry(
        model=manifest.name,
        board_type=manifest.board_type,
        simulated=manifest.simulated,
        device=manifest.device,
        operating_point=point,
        artifact=str(place),
        library_sha256=manifest.library.sha256,
        latency_s=latency_s,
        created_at=time.time(),
    )
    others = read_baseline(path).entries if path.exists() else ()
    kept = Baseline(entries=(*(each for each in others if each.key != entry.key), entry))
    with new_file(path) as partial:
        partial.write_text(json.dumps(kept.model_dump(mode="json"), indent=2) + "\n")
    return entry


def _to_word(point: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in point)
