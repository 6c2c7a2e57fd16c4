"""Compare each workload of the zoo's models with the machine's peak in the same run.

Convolutions and matrix products: share of the FMA peak. All others: share of a plain copy's bandwidth. Schedules are
the predicted ones. Kernels and peaks take turns, and the least time of each counts, since other load can only add to
it. Also: each model over the sum of its kernels as trials time them, medians of ratios within a round. Default budget:
15 minutes on two cores.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import _farm
import _machine
import _peak
import numpy as np

import farm.settings
from device_agent.protocol import Engine, TensorSpec
from farm.inventory.board_types import require_board_type
from farm.search import tvm_env
from farm.search.codegen import lowering
from farm.search.tvm_env import host_target
from farm.values import Workload

MODELS = "squeezenet1.1,resnet18,mobilenet_v2"
# Of a model in each round.
MODEL_RUNS = 24
COMPUTE = ("conv2d", "depthwise_conv2d", "dense")
DENSE, DEPTHWISE, MEMORY = "conv2d of 20 MFLOP and more", "depthwise 3x3 of stride 1", "bound by memory"


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each kernel (default: 4)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds = "tiny-cnn", 1
    with _machine.only_json() as emit, _machine.scratch():
        emit("kernel_shares", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    settings = farm.settings.load()
    target = host_target(_machine.cores())
    threads = [int(text) for text in options.threads.split(",")]
    models = {name: _farm.read_model(name) for name in options.models.split(",")}
    parts = {name: model.prepare(target) for name, model in models.items()}
    workloads = {workload.hash: workload for part in parts.values() for workload in part}
    _machine.say(f"building {len(workloads)} kernels")
    kernels = {key: [build(workload, count) for count in threads] for key, workload in workloads.items()}
    sizes = {key: bytes_of(workload) // 2 for key, workload in workloads.items() if workload.kind not in COMPUTE}
    peaks = _peak.Peaks(target, threads, sorted(set(sizes.values())))
    least_s: dict[_peak.Kernel, float] = {}
    with _farm.builder(settings, require_board_type("local"), 0) as compiler:
        libraries = {name: compiler(model).library for name, model in models.items()}
    ratios: dict[str, dict[str, list[float]]] = {name: {str(count): [] for count in threads} for name in models}
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for number in range(options.rounds):
            _machine.say(f"round {number + 1} of {options.rounds}")
            peaks.measure(session, settings)
            for kernel in (kernel for both in kernels.values() for kernel in both):
                seconds = _peak.fetch_least_s(session, settings, kernel)
                least_s[kernel] = min(seconds, least_s.get(kernel, math.inf))
            for name, model in models.items():
                for at, count in enumerate(threads):
                    program = {name: _farm.Program(Engine.RELAX_VM, libraries[name], count)}
                    ran = _farm.time_in_turns(session, settings, model, program, MODEL_RUNS)[name].samples
                    alone_s = sum(
                        each.weight * _peak.fetch_trial_s(session, settings, kernels[each.hash][at])
                        for each in parts[name]
                    )
                    ratios[name][str(count)].append(statistics.median(ran) / alone_s)
    rows = []
    for key, workload in workloads.items():
        row: dict[str, Any] = {"workload": workload.name, "kind": kind_of(workload), "us": {}, "share": {}}
        for kernel in kernels[key]:
            count, seconds = kernel.threads, least_s[kernel]
            best_s = peaks.copy_s(count, sizes[key]) if key in sizes else workload.flop / peaks.flop_per_s(count)
            row["us"][str(count)] = _machine.round_to(seconds * 1e6)
            row["share"][str(count)] = _machine.round_to(best_s / seconds, 3)
        rows.append(row)
    return {
        "machine_quiet": quiet,
        "share_is": "of the FMAs in registers, or of a plain copy's bandwidth where it is bound by memory",
        "peak": peaks.summary,
        "model_over_its_kernels": {
            name: {count: _machine.round_to(statistics.median(found), 3) for count, found in both.items()}
            for name, both in ratios.items()
        },
        "summary": {str(count): summarise(rows, str(count)) for count in threads},
        "workloads": rows,
    }


def build(workload: Workload, threads: int) -> _peak.Kernel:
    """The workload's code, its weights taken as packed already."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    module = _farm.schedule(workload)
    arguments = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
    return _peak.Kernel(
        lowering.build_candidate(tvm.ir.save_json(module), workload.target),
        tuple(TensorSpec(tuple(int(size) for size in one.shape), str(one.dtype)) for one in arguments),
        threads,
        flop=workload.flop,
    )


def bytes_of(workload: Workload) -> int:
    """Return the bytes of all arguments: each is read or written once at least."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in workload.arguments)


def kind_of(workload: Workload) -> str:
    """Which of the project's promises is meant, or the operator where none is."""
    if workload.kind == "conv2d" and workload.flop >= 20e6:
        return DENSE
    if workload.kind == "depthwise_conv2d" and " 3x3 " in workload.name:
        return DEPTHWISE
    return workload.kind if workload.kind in COMPUTE else MEMORY


def summarise(rows: Sequence[Mapping[str, Any]], threads: str) -> dict[str, Any]:
    """Spread of the shares, by kind."""
    kinds = sorted({row["kind"] for row in rows})
    return {
        kind: _machine.spread([row["share"][threads] for row in rows if row["kind"] == kind], digits=3)
        for kind in kinds
    }


if __name__ == "__main__":
    main()
