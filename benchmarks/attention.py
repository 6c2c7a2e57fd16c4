"""Attention of ONNX's opset 23, compiled without a trial, beside ONNX Runtime: medians of alternating rounds.

12 heads of 64; 128 and 512 tokens; with and without a causal mask; one and two threads.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import _machine
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from farm.artifacts.compile import compile_model
from farm.search import target
from farm.search.tvm_env import tvm

HEADS, SIZE = 12, 64


def time_once(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, over so many seconds."""
    taken: list[float] = []
    while sum(taken) < seconds:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """Run all of them and print the figures."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each timing (default: 0.3)")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each (default: 7)")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 0.01, 1
    with _machine.only_json() as emit, _machine.scratch() as folder:
        rows = []
        for tokens, causal, threads in itertools.product((128, 512), (0, 1), (1, 2)):
            shape = (1, HEADS, tokens, SIZE)
            infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkvy"]
            node = helper.make_node("Attention", list("qkv"), ["y"], is_causal=causal)
            graph = helper.make_graph([node], "attention", infos[:3], infos[3:])
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
            arrays = {name: np.random.default_rng(1).standard_normal(shape).astype("float32") for name in "qkv"}
            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = threads
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
            )
            compiled = compile_model(
                model, dict.fromkeys("qkv", shape), target.host_target(threads), "graph/2", [], None
            )
            path = folder / f"{tokens}-{causal}-{threads}.so"
            path.write_bytes(compiled.library)
            tvm.get_global_func("runtime.config_threadpool")(1, threads)
            machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
            given = [tvm.runtime.tensor(each) for each in arrays.values()]
            off = np.abs(machine["main"](*given).numpy() - session.run(None, arrays)[0]).max()

            def ours(machine: object = machine, given: list[object] = given) -> object:
                return machine["main"](*given)  # type: ignore[index]

            def theirs(session: object = session, arrays: dict[str, object] = arrays) -> object:
                return session.run(None, arrays)  # type: ignore[attr-defined]

            pairs = [
                (time_once(ours, options.seconds), time_once(theirs, options.seconds)) for _ in range(options.rounds)
            ]
            rows.append(
                {
                    "tokens": tokens,
                    "causal": bool(causal),
                    "threads": threads,
                    "ours_ms": _machine.spread([a for a, _ in pairs], 1e3),
                    "onnxruntime_ms": _machine.spread([b for _, b in pairs], 1e3),
                    "ratio": _machine.spread([a / b for a, b in pairs]),
                    "largest_difference": float(off),
                }
            )
            _machine.say(f"{tokens} tokens, causal {causal}, {threads} threads: {rows[-1]['ratio']}")
        emit("attention", vars(options), {"attention": rows})


if __name__ == "__main__":
    main()
