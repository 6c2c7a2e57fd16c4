"""Graph pipelines: what is done to a model before its workloads are extracted, and the same again when it is compiled.

A pipeline's name is part of a workload's identity. Changing what a pipeline does means giving it a new name.
`benchmarks/graph_pipeline.py` measures them against each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from farm.errors import UsageError
from farm.search import canonical, constants, gathering, joins, spelling, transposes, tvm_env, vector_math, widening


@dataclasses.dataclass(frozen=True)
class GraphPipeline:
    """`layout`: data and kernel layout of convolutions, or None for the model's own. `prepack`: may weights move?

    `canonical`: are functions brought to the form that schedule families are written for?
    """

    name: str
    layout: tuple[str, str] | None
    prepack: bool
    canonical: bool = False


PIPELINES = {
    p.name: p
    for p in (
        # Measured best on x86 and expected best on Arm: see docs/performance.md.
        GraphPipeline("graph/2", ("NHWC", "HWIO"), prepack=True, canonical=True),
        GraphPipeline("graph/1", ("NHWC", "HWIO"), prepack=True),
        GraphPipeline("graph/1-nchw", None, prepack=True),
        GraphPipeline("graph/1-plain", None, prepack=False),
    )
}


def require_pipeline(name: str) -> GraphPipeline:
    """The pipeline called `name`. Raises UsageError listing the known ones."""
    try:
        return PIPELINES[name]
    except KeyError:
        raise UsageError(f"no graph pipeline {name!r}; known: {', '.join(PIPELINES)}") from None


def prepare(module: Any, target: Any, pipeline: GraphPipeline) -> tuple[Any, GraphPipeline]:
    """Bring an imported module to the form whose functions are tuned. Returns it with the pipeline really used.

    Where TVM cannot convert a model's layout, the NCHW pipeline is used instead; its name tells.
    """
    tvm = tvm_env.load_compiler()
    try:
        return _run(module, target, pipeline), pipeline
    except (tvm.error.InternalError, ValueError, RuntimeError):
        if pipeline.layout is None:
            raise
        fallback = PIPELINES["graph/1-nchw"]
        return _run(module, target, fallback), fallback


def _run(module: Any, target: Any, pipeline: GraphPipeline) -> Any:
    tvm = tvm_env.load_compiler()
    from tvm import relax
    from tvm.relax import transform

    passes = [
        transform.FoldBatchnormToConv2D(),
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        constants.fold_shapes(),
        transform.FoldConstant(),
    ]
    if pipeline.canonical:
        passes.append(spelling.respell())
    if pipeline.layout:
        # TVM would lay a deconvolution out as its neighbours and has no code for it in any layout but ONNX's.
        layouts = {"relax.nn.conv2d": list(pipeline.layout), "relax.nn.conv2d_transpose": ["NCHW", "IOHW"]}
        if pipeline.canonical:
            layouts |= {"relax.nn.conv1d": ["NWC", "WIO"], "relax.nn.conv3d": ["NDHWC", "DHWIO"]}
        passes += [transform.ConvertLayout(layouts), constants.fold_shapes()]
    if pipeline.canonical:
        passes += [transposes.sink(), widening.widen(target), joins.mark(), vector_math.legalise()]
    passes.append(relax.get_pipeline("zero"))
    if pipeline.canonical:
        passes += [joins.split(), gathering.gather()]
    if pipeline.prepack:
        passes.append(transform.AttachAttrLayoutFreeBuffers())
    if pipeline.canonical:
        passes.append(canonical.canonicalise_all())
    with target:
        return tvm.transform.Sequential(passes)(module)


def finish(module: Any, target: Any, database: Any | None, pipeline: GraphPipeline) -> Any:
    """Apply the database's schedules to a prepared module and pack its constant weights; ready for `relax.build`."""
    tvm = tvm_env.load_compiler()
    from tvm.relax import transform

    with target, contextlib.nullcontext() if database is None else database:
        passes = []
        if database is not None:
            passes.append(transform.MetaScheduleApplyDatabase(enable_warning=False))
        if pipeline.prepack:
            passes += [transform.SplitLayoutRewritePreproc(), transform.LiftTransformParams(), transform.FoldConstant()]
        if pipeline.canonical:
            passes.append(joins.share())
        return tvm.transform.Sequential(passes)(module) if passes else module
