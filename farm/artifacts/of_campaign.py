"""The artifacts of a finished campaign: every model compiled for every board type, verified there, and packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from farm.artifacts import checking, make
from farm.artifacts.brought import Brought, bring_same
from farm.artifacts.listed import ToCompile, list_artifacts
from farm.artifacts.manifest import ModelFacts
from farm.artifacts.on_board import hold_type
from farm.artifacts.package import WHEEL, explain_name, write_package
from farm.inventory.board_types import require_board_type
from farm.settings import Settings
from farm.store import Store


@dataclasses.dataclass(frozen=True)
class MadeArtifact:
    """What became of one: where it is, whether it computes what it should, and its package (None: not packed)."""

    name: str
    board_type: str
    folder: Path
    matches: bool
    reason: str
    package: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        paths = {"folder": str(self.folder), "package": str(self.package) if self.package else None}
        return dataclasses.asdict(self) | paths


def make_artifacts(
    document: Mapping[str, Any],
    out: Path,
    settings: Settings,
    store: Store,
    wait_s: float,
    say: Callable[[str], None],
    keep: Callable[[MadeArtifact], None] = lambda made: None,
    done: Collection[str] = (),
) -> list[MadeArtifact]:
    """Compile, verify and pack everything but what is `done`, by name; `document` is the campaign's.

    `keep` is told of each one as soon as it is there. Raises what the steps raise.
    """
    made = []
    for wanted in list_artifacts(document):
        if wanted.name in done:
            continue
        kind = require_board_type(wanted.board_type).model_copy(update={"pipeline": wanted.pipeline})
        say(f"{wanted.name}: compiling")
        brought = _bring(wanted)
        order = make.CompileOrder(brought, kind, wanted.point, wanted.simulated)
        artifact = make.make_artifact(order, out / wanted.name, settings, store, say)
        cases = checking.make_cases(brought, artifact.manifest, ())
        say(f"{wanted.name}: verifying on a board of type {kind.name}")
        with hold_type(settings, store, kind, wait_s, f"verify {wanted.name}", say, is_timed=False) as board:
            verdict = checking.verify_artifact(artifact, board, brought.source, cases)
        package = write_package(artifact, WHEEL, out, None) if verdict.matches else None
        if package and (why := explain_name(artifact.manifest.name).partition(";")[0]):
            say(f"{wanted.name}: {why}")
        made.append(MadeArtifact(wanted.name, kind.name, artifact.folder, verdict.matches, verdict.reason, package))
        keep(made[-1])
    return made


def _bring(wanted: ToCompile) -> Brought:
    about = wanted.model
    model = ModelFacts(
        name=about["name"],
        sha256=about["sha256"],
        origin=about["origin"],
        shapes=tuple(about.get("shapes", ())),
        batch=about["batch"],
    )
    return bring_same(model, None, "the campaign tuned")
