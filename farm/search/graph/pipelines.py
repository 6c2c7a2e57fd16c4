"""The table of graph pipelines, and the choice of one; `pipeline.py` has their passes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.search import gpus
from farm.search.graph import half_precision
from farm.values import is_for_gpu

Weights = Literal["float32", "bf16", "bf16-all", "fp16"]
# As in the model; bfloat16 weights where that is predicted to gain; bfloat16 weights in all register tiles; all
# arithmetic in float16.
FLOAT32: Weights = "float32"
BF16: Weights = "bf16"
BF16_ALL: Weights = "bf16-all"
FP16: Weights = "fp16"
KNOWN: tuple[Weights, ...] = (FLOAT32, BF16, BF16_ALL, FP16)


@dataclasses.dataclass(frozen=True)
class GraphPipeline:
    """A graph pipeline and its options.

    `layout` is the data and kernel layout of convolutions, None for the model's own. `prepack` packs weights.
    `canonical` brings functions to the form of the schedule families. `winograd` allows Winograd's algorithm, `exact`
    only where it rounds no worse than a direct convolution. `polynomials` vectorises exponentials and similar functions
    instead of calling the C library. `weights` selects half precision.
    """

    name: str
    layout: tuple[str, str] | None
    prepack: bool
    canonical: bool = False
    winograd: Literal["never", "exact", "any"] = "never"
    polynomials: bool = False
    weights: Weights = FLOAT32

    @property
    def tuned_as(self) -> str:
        """The pipeline that its workloads name: a function itself shows how its weights are stored."""
        return self.name.removesuffix(f"-{self.weights}")


_FLOAT32 = (
    # The fastest measured on x86 and estimated on Arm.
    GraphPipeline("graph/2", ("NHWC", "HWIO"), prepack=True, canonical=True, winograd="any", polynomials=True),
    GraphPipeline("graph/2-exact", ("NHWC", "HWIO"), prepack=True, canonical=True, winograd="exact"),
    # For GPUs: weights keep their layout and are read in rows.
    GraphPipeline(gpus.PIPELINE, ("NHWC", "HWIO"), prepack=False, canonical=True, winograd="any"),
    GraphPipeline(gpus.EXACT_PIPELINE, ("NHWC", "HWIO"), prepack=False, canonical=True, winograd="exact"),
    # Where TVM cannot convert a model's layout.
    GraphPipeline("graph/2-nchw", None, prepack=True),
    # For untuned code.
    GraphPipeline("graph/2-plain", None, prepack=False),
)
_HALVED = (
    dataclasses.replace(p, name=f"{p.name}-{weights}", weights=weights)
    for p in _FLOAT32
    if p.canonical
    for weights in (KNOWN[1:] if p.prepack else (FP16,))
)
PIPELINES = {p.name: p for p in (*_FLOAT32, *_HALVED)}


def require_pipeline(name: str) -> GraphPipeline:
    """Return the pipeline called `name`. Raises UsageError that lists the known ones."""
    try:
        return PIPELINES[name]
    except KeyError:
        raise UsageError(f"no graph pipeline {name!r}; known: {', '.join(PIPELINES)}") from None


def is_canonical(name: str) -> bool:
    """Say whether a pipeline brings functions to the form of the schedule families; no unknown one does."""
    return name in PIPELINES and PIPELINES[name].canonical


def exact(name: str) -> str:
    """Return the name of the pipeline like `name`, without what rounds worse than the model."""
    pipeline = require_pipeline(name)
    if pipeline.winograd != "any":
        return name
    wanted = dataclasses.replace(pipeline, winograd="exact", polynomials=False)
    return next(each for each, p in PIPELINES.items() if p == dataclasses.replace(wanted, name=each))


def make_exact(kind: BoardType, wanted: bool) -> BoardType:
    """Return the board type, with the `exact` variant of its graph pipeline where `wanted`."""
    return kind.model_copy(update={"pipeline": exact(kind.pipeline)}) if wanted else kind


def store_weights(kind: BoardType, weights: str) -> BoardType:
    """Return the board type with the graph pipeline that stores weights so. Raises UsageError where there is none."""
    if weights not in KNOWN:
        raise UsageError(f"--weights {weights!r} is unknown", f"Known: {', '.join(KNOWN)}.")
    own = require_pipeline(kind.pipeline)
    for name, each in PIPELINES.items():
        if each == dataclasses.replace(own, name=name, weights=weights):
            if weights == FP16 and kind.target is not None and not is_for_gpu(name):
                half_precision.require(kind.target.to_tvm())
            return kind.model_copy(update={"pipeline": name})
    raise UsageError(
        f"the graph pipeline {own.name} cannot store weights as {weights}",
        "CPU pipelines such as graph/2 can; those of GPUs only compute in fp16.",
    )
