"""Gather a plan's inputs: the file, models, boards and the store's facts; keep plans.

`plan` computes the plan. No board is touched.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm import folders
from farm.campaign.plan import CampaignPlan, Known, Sampling, plan_campaign
from farm.campaign.plan_boards import BoardsOfType, choose_boards
from farm.campaign.plan_models import ModelVariant, read_models
from farm.campaign.plan_survey import Form, WorkloadSurvey, survey_apart
from farm.campaign.spec import CampaignFile, MeasureOptions
from farm.errors import UsageError
from farm.inventory import documents
from farm.inventory.board_types import load_board_types
from farm.inventory.documents import Place
from farm.settings import Settings
from farm.store import Store

FOLDER = "plans"


def keep_plan(home: pathlib.Path, document: Mapping[str, Any]) -> pathlib.Path:
    """Save a plan (`plan.to_document`) in place of its campaign's last one, atomically. Raises OSError."""
    path = _path(home, str(document["name"]))
    folders.make_private(path.parent)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".plan-")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        pathlib.Path(name).replace(path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
    return path


def find_plan(home: pathlib.Path, name: str) -> Mapping[str, Any] | None:
    """Return the last plan of the campaign called `name`. Raises UsageError where the file is invalid."""
    path = _path(home, name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document["models"], list) and all("sha256" in each for each in document["models"]):
            return dict(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is no plan", "Remove it, and plan the campaign again.")


def require_unchanged(plan: Mapping[str, Any], models: Sequence[ModelVariant]) -> None:
    """Refuse models whose bytes differ from the planned ones. Raises UsageError naming each that differs.

    A model that the plan lacks belongs to another file's plan, and is not compared.
    """
    planned = {each["name"]: each["sha256"] for each in plan["models"]}
    changed = [each for each in models if planned.get(each.name, each.source.sha256) != each.source.sha256]
    if changed:
        told = "; ".join(
            f"{each.name} ({each.source.origin}) was {planned[each.name][:12]} and is {each.source.sha256[:12]}"
            for each in changed
        )
        raise UsageError(
            f"models have changed since the campaign {plan['name']} was planned: {told}",
            "Trials of both would count as one campaign's. Plan it again if that is intended.",
        )


def _path(home: pathlib.Path, name: str) -> pathlib.Path:
    return home / FOLDER / f"{name}.json"


Surveyed = list[tuple[ModelVariant, WorkloadSurvey]]


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A plan, and the survey of every model on every board type that can hold it."""

    plan: CampaignPlan
    surveyed: tuple[tuple[BoardsOfType, Surveyed], ...]


def make_plan(campaign: CampaignFile, store: Store, settings: Settings, note: Callable[[str], None]) -> CampaignPlan:
    """Plan a campaign as things are now; `note` gets messages before slow steps.

    Raises UsageError naming the line of everything in the file that is impossible, as far as was checked.
    """
    return gather(campaign, store, settings, note).plan


def gather(
    campaign: CampaignFile,
    store: Store,
    settings: Settings,
    note: Callable[[str], None],
    begin: Callable[[], None] = lambda: None,
    *,
    kept: Mapping[str, Any] | None = None,
    texts: bool = False,
) -> Gathered:
    """Return a plan and its inputs; `texts`: include the text of every workload's function, for a run.

    `begin` is called once all but the models' contents was checked; importing these takes the time. Raises UsageError
    as `make_plan` does, and where models are not those of `kept`, the plan that the user has seen.
    """
    spec = campaign.spec
    host_cores = len(os.sched_getaffinity(0))
    sampling = _read_sampling(spec.measure, settings, campaign)
    models, faults = read_models(campaign)
    if kept is not None:
        require_unchanged(kept, models)
    types, more = choose_boards(spec, load_board_types(), store.fetch_boards(), models, host_cores)
    if faults := [*faults, *more]:
        raise documents.to_error(campaign.path, faults)
    for each in types:
        if each.left_out:
            note(each.left_out)
        for text in each.merged:
            note(f"{each.board_type.name}: {text}")
    begin()
    surveyed = _survey(campaign, models, types, note, texts)
    known = {each.board_type.name: _fetch_known(store, each, surveys) for each, surveys in surveyed}
    planned = plan_campaign(spec.name, spec.budget, sampling, spec.search.ops, models, surveyed, known, host_cores)
    return Gathered(planned, tuple(surveyed))


def _read_sampling(spec: MeasureOptions, settings: Settings, campaign: CampaignFile) -> Sampling:
    """Return how candidates are timed. Raises UsageError where that exceeds its deadline."""
    sampling = Sampling(
        spec.repeat or settings.measure_repeat,
        settings.measure_min_repeat_s if spec.min_repeat is None else spec.min_repeat,
        verify_top=spec.verify_top,
    )
    timeout_s = settings.measure_timeout_s if spec.timeout is None else spec.timeout
    least_s = sampling.repeat * sampling.min_repeat_s
    if least_s >= timeout_s:
        message = (
            f"measure: {sampling.repeat} samples of {sampling.min_repeat_s:g} s take {least_s:g} s, which is not "
            f"within the timeout of {timeout_s:g} s"
        )
        raise documents.to_error(campaign.path, [(("measure",), message)])
    return sampling


def _survey(
    campaign: CampaignFile,
    models: Sequence[ModelVariant],
    types: Sequence[BoardsOfType],
    note: Callable[[str], None],
    texts: bool,
) -> list[tuple[BoardsOfType, Surveyed]]:
    """Survey every model for every type that can hold it. Types of one form share an import."""
    wanted = [(model, each, _to_form(each)) for each in types for model in models if model.name not in each.too_big]
    jobs = list({(model.index, model.batch, form): (model, form) for model, _, form in wanted}.values())
    answers = {
        (model.index, model.batch, form): answer
        for (model, form), answer in zip(jobs, survey_apart(jobs, note, texts=texts), strict=True)
    }
    faults: list[tuple[Place, str]] = [
        (("models", model.index), f"{model.name}: {documents.to_text(answer)}")
        for model, form in jobs
        if isinstance(answer := answers[model.index, model.batch, form], UsageError)
    ]
    if faults:
        raise documents.to_error(campaign.path, list(dict.fromkeys(faults)))
    surveyed: list[tuple[BoardsOfType, Surveyed]] = [(each, []) for each in types]
    for boards, surveys in surveyed:
        for model, each, form in wanted:
            answer = answers[model.index, model.batch, form]
            if each is boards and isinstance(answer, WorkloadSurvey):
                surveys.append((model, answer))
    _require_work(campaign, surveyed)
    return surveyed


def _to_form(boards: BoardsOfType) -> Form:
    return Form.of(boards.target.config, boards.target.cores, boards.board_type.pipeline)


def _require_work(campaign: CampaignFile, surveyed: Sequence[tuple[BoardsOfType, Surveyed]]) -> None:
    """Raise UsageError for operators and models that leave nothing to tune."""
    ops = campaign.spec.search.ops
    by_model: dict[tuple[int, str], set[str]] = {}
    for _, surveys in surveyed:
        for model, survey in surveys:
            by_model.setdefault((model.index, model.name), set()).update(each.kind for each in survey.workloads)
    kinds = set().union(*by_model.values())
    faults: list[tuple[Place, str]] = [
        (("search", "ops", index), f"no model has the operator {op}; they have {', '.join(sorted(kinds)) or 'none'}")
        for index, op in enumerate(ops)
        if op not in kinds
    ]
    for (index, name), own in by_model.items():
        if not own:
            faults.append((("models", index), f"{name} has nothing that can be tuned"))
        elif ops and not faults and not own & set(ops):
            faults.append(
                (("models", index), f"{name} has none of the operators of search.ops; it has {', '.join(sorted(own))}")
            )
    if faults:
        raise documents.to_error(campaign.path, faults)


def _fetch_known(store: Store, boards: BoardsOfType, surveys: Surveyed) -> Known:
    name, simulated = boards.board_type.name, boards.simulated
    hashes = sorted({each.hash for _, survey in surveys for each in survey.workloads})
    return Known(
        store.fetch_trial_costs(name, simulated=simulated),
        store.count_known_candidates(hashes, name, simulated=simulated),
        frozenset(store.fetch_recorded(hashes, name, simulated=simulated)),
    )
