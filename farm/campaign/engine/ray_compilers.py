"""Compilers as Ray's actors, on this machine or on another one of the cluster.

They are actors rather than plain tasks, so that who is replaced, and when, is decided by the pool and not by Ray's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from farm.campaign.engine import ray_calls
from farm.search.build.build_pool import Builder, BuildPool, CompilerLostError, Job
from farm.search.tvm_errors import find_reason
from farm.settings import Settings


class RayBuildPool(BuildPool[Job]):
    """References are Ray's."""

    def __init__(self, size: int, settings: Settings, options: Mapping[str, Any] | None = None) -> None:
        """`options` are Ray's for actors: where they run."""
        self._options = {"num_cpus": 0, "max_restarts": 0, **(options or {})}
        super().__init__(size, settings)

    def _launch(self) -> tuple[Any, Any]:
        actor = ray.remote(**self._options)(Builder).remote()
        return actor, actor.versions.remote()

    def _ask(self, compiler: Any, *order: Any) -> Any:
        return compiler.build.remote(*order)

    def _find_done(self, references: Sequence[Any]) -> list[Any]:
        return ray_calls.find_done(references)

    def _fetch(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            raise CompilerLostError(f"{type(error).__name__}: {find_reason(error)}") from error

    def _kill(self, compiler: Any) -> None:
        ray_calls.kill(compiler)

    def _find_pid(self, compiler: Any) -> int:
        return int(ray.get(compiler.pid.remote()))
