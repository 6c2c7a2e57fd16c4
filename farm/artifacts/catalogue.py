"""The compile command for each tuned model, board type and operating point, and the artifacts made on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.protocol import GPU
from farm.artifacts import artifact_folder, manifest
from farm.errors import UsageError
from farm.folders import make_private
from farm.inventory.board_types import require_board_type
from farm.models.lengths import split_shapes
from farm.values import DEFAULT_POINT, is_for_gpu, read_pipeline

_FOLDER = "artifacts"


def note_artifact(home: Path, artifact: artifact_folder.Artifact) -> None:
    """Remember where an artifact is; ignore a failure to write the note."""
    path = str(artifact.folder.absolute())
    with contextlib.suppress(OSError):
        make_private(home / _FOLDER)
        (home / _FOLDER / hashlib.sha256(path.encode()).hexdigest()[:32]).write_text(path, encoding="utf-8")


def list_made_here(home: Path) -> list[artifact_folder.Artifact]:
    """List the artifacts that still exist, the newest first; remove the notes of others."""
    found = []
    notes = home / _FOLDER
    for note in sorted(notes.iterdir()) if notes.is_dir() else ():
        try:
            found.append(artifact_folder.open_artifact(Path(note.read_text(encoding="utf-8"))))
        except (OSError, UnicodeDecodeError):
            continue
        except UsageError:
            with contextlib.suppress(OSError):
                note.unlink()
    return sorted(found, key=lambda each: -each.manifest.created_at)


@dataclasses.dataclass(frozen=True)
class ArtifactFilters:
    """Filters of artifacts; empty texts and False select all."""

    model: str = ""
    board_type: str = ""
    device: str = ""
    weights: str = ""
    verified: bool = False
    simulated: bool = False

    def choose(self, found: Iterable[artifact_folder.Artifact]) -> list[artifact_folder.Artifact]:
        """Return the selected artifacts in their order. Raises UsageError for an unknown board type."""
        board_type = require_board_type(self.board_type).name if self.board_type else ""
        return [each for each in found if self._is_meant(each.manifest, board_type)]

    def _is_meant(self, about: manifest.Manifest, board_type: str) -> bool:
        return (
            self.model in about.name
            and board_type in ("", about.board_type)
            and self.device in ("", about.device)
            and self.weights in ("", about.weights.asked)
            and (not self.verified or (about.verified is not None and about.verified.matches))
            and (not self.simulated or about.simulated)
        )


def to_document(artifact: artifact_folder.Artifact) -> dict[str, Any]:
    """Return what `farm model artifacts --json` prints of one; `latency_s` is the newest measured median, else None."""
    about = artifact.manifest
    newest = about.measured[-1] if about.measured else None
    return {
        "folder": str(artifact.folder),
        "model": about.name,
        "board_type": about.board_type,
        "simulated": about.simulated,
        "device": about.device,
        "operating_point": about.operating_point,
        "weights": about.weights.asked,
        "bytes": about.library.bytes,
        "verified": None if about.verified is None else about.verified.matches,
        "latency_s": newest.latency["median"] if newest else None,
        "records": about.count("record"),
        "workloads": len(about.workloads),
        "created_at": about.created_at,
    }


@dataclasses.dataclass(frozen=True)
class ToCompile:
    """One artifact to compile: `model` is from the campaign's document, `pipeline` the one that it was tuned with."""

    model: Mapping[str, Any]
    board_type: str
    point: str
    simulated: bool
    pipeline: str
    name: str

    @property
    def command(self) -> str:
        """The command to type."""
        words = ["farm", "model", "compile", str(self.model["origin"]).removeprefix("zoo:")]
        words += ["--board-type", self.board_type]
        words += ["--operating-point", self.point] if self.point != DEFAULT_POINT else []
        words += list_model_options(self.model.get("batch"), self.model.get("shapes", ()))
        words += ["--simulated"] if self.simulated else []
        return shlex.join([*words, *list_options(self.pipeline), "--out", self.name])


def list_options(pipeline: str) -> list[str]:
    """Return the options of `farm tune` and `farm model compile` that choose a graph pipeline."""
    exact, weights = read_pipeline(pipeline)
    words = ["--exact"] if exact else []
    words += ["--weights", weights] if weights else []
    return words + (["--device", GPU] if is_for_gpu(pipeline) else [])


def list_model_options(batch: int | None, shapes: Sequence[str]) -> list[str]:
    """Return the options of both that choose a model's batch size and shapes."""
    words = ["--batch", str(batch)] if batch is not None else []
    return words + [word for shape in shapes for word in ("--shape", shape)]


def list_artifacts(document: Mapping[str, Any]) -> list[ToCompile]:
    """List all artifacts that a campaign's records serve, in the order of its models.

    A model with a range of lengths has one for all.
    """
    return [
        ToCompile(
            model,
            kind["type"],
            point,
            bool(kind["simulated"]),
            kind["pipeline"],
            to_name(model["name"], kind["type"], "" if len(kind["points"]) == 1 else point),
        )
        for model in filter(None, map(_join_lengths, document["models"]))
        for kind in document["types"]
        for point in kind["points"]
    ]


def _join_lengths(model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a model with the whole range of its lengths; None for those besides the greatest."""
    _, lengths = split_shapes([model["lengths"]] if model.get("lengths") else [])
    if lengths is None:
        return model
    fixed = model["shapes"][-1]
    if fixed != lengths.fix(lengths.sizes[-1]):
        return None
    name, shapes = model["name"].removesuffix(f" {fixed}"), [*model["shapes"][:-1], lengths.text]
    return {**model, "name": name, "shapes": shapes}


def to_name(*words: str) -> str:
    """Make a folder name without special characters of shells."""
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-") for word in words if word)
