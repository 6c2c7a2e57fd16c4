"""A model as the user gave it, with all input shapes resolved, and how to find it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farm import settings as farm_settings
from farm.artifacts.manifest import Manifest, ModelFacts
from farm.errors import UsageError
from farm.models.batches import set_batch
from farm.models.inputs import InputSpec, parse_shapes, read_inputs, resolve_inputs
from farm.models.source import ModelSource, find_model, resolve_model

_HINT = (
    "Give its file with --model, or compile the model again. On several hosts: set FARM_SHARED to a folder that all of "
    "them see, and models of campaigns submitted from then on are found there."
)


@dataclasses.dataclass(frozen=True)
class Brought:
    """`source` is what is compiled: the model of `about`, with another batch size if requested."""

    source: ModelSource
    inputs: tuple[InputSpec, ...]
    about: ModelFacts


def bring(text: str, shapes: Sequence[str] = (), batch: int | None = None, trusted: bool = False) -> Brought:
    """Find the model that `text` names and resolve its shapes by `--shape` and `--batch`. Raises UsageError."""
    source = resolve_model(text, trusted)
    about = ModelFacts(name=source.name, sha256=source.sha256, origin=source.origin, shapes=tuple(shapes), batch=batch)
    if batch is None:
        model = source.load()
        return Brought(source, resolve_inputs(read_inputs(model), parse_shapes(shapes), model), about)
    batched, inputs = set_batch(source, shapes, batch)
    return Brought(source.changed(batched), inputs, about)


def bring_again(manifest: Manifest, given: str | None) -> Brought:
    """Find the model of an artifact: at its origin, or `given`. Raises UsageError."""
    return bring_same(manifest.model, given, f"{manifest.name} was compiled from")


def bring_same(about: ModelFacts, given: str | None, what: str) -> Brought:
    """Find the model that `about` describes; `what` names its user. Raises UsageError where it has changed.

    The description may be malicious, so nothing is read that could run code.
    """
    if given is None and (kept := _bring_kept(about)) is not None:
        return kept
    try:
        found = bring(given or about.typed, about.shapes, about.batch)
    except UsageError as error:
        raise UsageError(f"the model that {what} is needed: {error.message}", _HINT) from error
    if found.about.sha256 != about.sha256:
        raise UsageError(
            f"{found.about.origin} is not the model that {what} (SHA-256 {about.sha256[:12]}…): it has changed", _HINT
        )
    return found


def _bring_kept(about: ModelFacts) -> Brought | None:
    """Find the model in the shared folder by its content, or None."""
    folder = farm_settings.load().models_path
    path = None if folder is None else find_model(folder, about.sha256)
    if path is None:
        return None
    found = bring(str(path), about.shapes, about.batch)
    source = dataclasses.replace(found.source, name=about.name, origin=about.origin)
    return Brought(source, found.inputs, about)
