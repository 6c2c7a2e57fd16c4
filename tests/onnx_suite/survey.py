"""How a case's operator is computed on a GPU and in 8 bits, as far as that is seen without running it."""

from __future__ import annotations

import onnx
from tvm.ir import load_json

from farm.errors import FarmError
from farm.gpu.code import plan_gpu
from farm.inventory.board_types import require_board_type
from farm.models import quantise
from farm.models.source import ModelSource
from farm.search import gpus, workloads
from farm.search.families import rule
from tests.onnx_suite.cases import Case

BOARD_TYPE = "jetson-nano"
_BYTES = ("int8", "uint8")


def find_gpu_way(case: Case) -> str:
    """Say what schedules the case's functions for a Nano's GPU: a family, TVM, or nothing, since there is no code."""
    board_type = gpus.require_device(require_board_type(BOARD_TYPE), gpus.GPU)
    assert board_type.target is not None
    config = gpus.to_config(BOARD_TYPE, plan_gpu(board_type), board_type.target.to_tvm(), simulated=False)
    try:
        found = workloads.prepare_model(case.model, case.shapes, config, board_type.pipeline)
    except FarmError:
        return "refused"
    read = [rule.read_outlook(load_json(w.module_json), gpus.unit_of(w.target)) for w in found.workloads]
    return "no code" if not read else "family" if all(read) else "TVM"


def find_8_bit_way(case: Case, host: dict[str, object], pipeline: str) -> str:
    """Say whether `farm model quantize` leaves a function of 8-bit data; "" for models that it does not take."""
    if not case.inputs:
        return ""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    data, *weights = case.inputs  # weights are constants, as in models
    del model.graph.input[1:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(case.inputs[name], name) for name in weights)
    try:
        source = ModelSource(case.name, model.SerializeToString(), "", "")
        quantised = quantise.quantise(source, [{data: case.inputs[data]}])
        changed = ModelSource(case.name, quantised.onnx_bytes, "", "").load()
        found = workloads.prepare_model(changed, {data: case.inputs[data].shape}, host, pipeline)
    except Exception:  # ONNX Runtime's quantiser raises anything for models that it was not made for
        return ""
    return "8 bits" if any(w.arguments[0][1] in _BYTES for w in found.workloads) else "float"
