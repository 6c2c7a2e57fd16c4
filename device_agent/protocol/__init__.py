"""Messages between the coordinator and an agent: statuses, specs, outcomes, the frame for big payloads.

Standard library only; the one part that both sides import. It does no I/O and knows no TVM.

Every `device_agent.*` function takes and returns JSON text. Where arrays or libraries travel too they are `bytes`
arguments beside the JSON, or come back in one frame (see `pack_frame`).
"""

from __future__ import annotations

from device_agent.protocol.hardware import Description
from device_agent.protocol.messages import Message, ProtocolError, StrEnum, load_json, pack_frame, unpack_frame
from device_agent.protocol.outcome import (
    EVERY_CLUSTER,
    Clocks,
    DomainClocks,
    Energy,
    EnergySpec,
    Evidence,
    FaultSide,
    Layer,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerSpec,
    PowerTrace,
    PowerWindow,
    RailPower,
    RunDetails,
    SensorInfo,
    Status,
)
from device_agent.protocol.processors import REACHED, START_S, WARP, Processor, Segment, count_seconds, find_processor
from device_agent.protocol.specs import (
    CPU,
    EMULATING_S,
    FENCE_PREFIX,
    GPU,
    PREPARE_S,
    RPC_MAGIC,
    RPC_MISMATCH,
    RPC_SUCCESS,
    ClaimReport,
    ClaimStatus,
    Command,
    Engine,
    LeaseClaim,
    Limits,
    MeasureSpec,
    RunSpec,
    StartConditions,
    TensorSpec,
    fence_key,
    parse_fence_key,
)
from device_agent.protocol.texts import (
    NAME_RULE,
    format_cpus,
    format_hz,
    format_mhz,
    format_table,
    is_name,
    parse_cpus,
    parse_hz,
)

# Raised whenever a message changes in a way that an older peer would misread.
PROTOCOL_VERSION = 9

# Names under which the agent registers its functions with TVM's RPC server. A name is part of the protocol: a peer of
# another version has to find DESCRIBE, which tells it the version.
CLAIM = "device_agent.claim"
DESCRIBE = "device_agent.describe"
MEASURE = "device_agent.measure"
RUN_MODEL = "device_agent.run_model"
KEEP_PROGRAM = "device_agent.keep_program"
RUN_KEPT = "device_agent.run_kept"
PIN = "device_agent.pin"
UNPIN = "device_agent.unpin"
POWER = "device_agent.power"
