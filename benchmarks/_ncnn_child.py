"""ncnn in a process of its own: `python _ncnn_child.py PARAM BIN INPUT.npy OUTPUT.npz THREADS`; started by `_ncnn.py`.

Runs once, writes the outputs and says `ready`; each line `run N` on stdin is answered with N latencies in seconds as a
JSON list. Ends with stdin. Imports nothing of this project: ncnn lives in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    param, weights, source, result, threads = sys.argv[1:]
    # Descriptor 1 is for answers alone; ncnn prints, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ncnn
    import numpy as np

    net = load(ncnn, param, weights, int(threads))
    values = np.load(source)  # a Mat does not keep alive what it was made from
    image = ncnn.Mat(values)

    def run() -> Any:
        extractor = net.create_extractor()
        extractor.input(net.input_names()[0], image)
        return [extractor.extract(name)[1] for name in net.output_names()]

    np.savez(result, *(np.array(output) for output in run()))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        latencies = []
        for _ in range(int(line.removeprefix("run "))):
            began = time.perf_counter()
            run()
            latencies.append(time.perf_counter() - began)
        print(json.dumps(latencies), file=answers, flush=True)


def load(ncnn: Any, param: str, weights: str, threads: int, *, half: bool = False) -> Any:
    """The network on the processor, in float32 throughout unless it may use `half` precision where the processor can.

    Everything else, Winograd included, is as ncnn has it.
    """
    net = ncnn.Net()
    net.opt.num_threads = threads
    net.opt.use_vulkan_compute = False
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"):
        setattr(net.opt, option, half)
    net.opt.use_bf16_storage = False
    if net.load_param(param) or net.load_model(weights):
        raise SystemExit(f"ncnn cannot read {param}")
    return net


if __name__ == "__main__":
    main()
