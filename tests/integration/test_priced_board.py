"""A certificate's core and prices: what is found out of a board, and what the farm goes by once it was told."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device_agent.emulated.core import load_core
from farm import emulation, settings
from farm.artifacts.priced import ask_core, price_programs
from farm.crew import golden_runs
from farm.inventory.board_types import require_board_type
from farm.inventory.core_types import find_core_type, load_core_types
from farm.measure.asking import AgentAddress
from farm.measure.session import BoardSession
from farm.search.build import golden
from farm.search.cores import core_of
from farm.services.board_certify import SCHEMA
from farm.services.calibrate_model import calibrate
from farm.services.certify_hardware import HardwareChecks, find_changes
from farm.services.checks import Doubt
from tests import together
from tests.integration.conftest import Agent

# Not what inventory/core_types says, by far more than boards of a type differ (3 %).
WAIT_CYCLES, CROWDING = 26.0, 0.7


@contextlib.contextmanager
def core_types(folder: pathlib.Path) -> Iterator[None]:
    """FARM_CORE_TYPES for a block, and the farm's own reading of it anew."""
    os.environ["FARM_CORE_TYPES"] = str(folder)
    load_core_types.cache_clear()
    try:
        yield
    finally:
        del os.environ["FARM_CORE_TYPES"]
        load_core_types.cache_clear()


def test_constants_are_found_again(start_agent: Callable[..., Agent], tmp_path: pathlib.Path) -> None:
    """A board's core waits longer than the model says: its certificate's prices are off, and no more once fitted."""
    together.share_what_is_built(tmp_path)
    loaded = dataclasses.replace(settings.load(), home=str(tmp_path), virtual_code=emulation.EMULATED)
    natives = emulation.prepare(loaded)
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "cortex-a57.yaml").write_text(
        f"name: cortex-a57\nsources: [chosen]\nwait_cycles: {WAIT_CYCLES}\ncrowding: {CROWDING}\n"
    )
    with core_types(changed):
        options = (
            "--virtual",
            "jetson-nano",
            "--emulator-folder",
            str(natives),
            "--work-folder",
            str(tmp_path / "work"),
        )
        agent = start_agent(*options, "--port", "9500", "--port-end", "9599")
    kind = require_board_type("jetson-nano")
    facts: dict[str, Any] = {}
    with BoardSession(AgentAddress("127.0.0.1", agent.port), f"jetson-nano/{agent.key.partition('/')[2]}") as session:
        kernels = golden.GoldenKernels(tmp_path / golden_runs.KERNEL_FOLDER)
        require = functools.partial(golden_runs.require_kernel, kernels, kind, "aarch64")
        hardware = HardwareChecks(session, kind, session.description.clocks, require, facts)
        told: list[str] = []
        said = price_programs(hardware, loaded, ("mlp",), told.append)
        whole, calls = session.run_model, itertools.count()

        def cut_short(*given: Any) -> Any:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return whole(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "run_model", cut_short)
            with pytest.raises(KeyboardInterrupt):
                ask_core(hardware)
        # Interrupted while its clocks were held: nothing is known of it, and they are as before.
        assert "core" not in facts
        after = session.unpin().clocks
        assert after is not None
        assert find_changes(hardware.before, after) == []
        # Figures four times off the type's are to be looked at, of a simulated board, too.
        asked = ask_core(hardware)
        assert isinstance(asked, Doubt), asked
        assert "l2_bytes_per_cycle" in asked.detail
    assert isinstance(said, Doubt), said
    assert [run["threads"] for run in facts["prices"]["runs"]] == [1, 1, 4, 1, 4, 1, 4]
    assert "prices: running mlp on 4 threads (7 of 7)" in told
    assert "prices: counting what 7 runs execute, 0 s so far" in told

    # Of a core that was emulated: what it can do in a cycle and where its first cache ends. Its sum waits four cycles.
    known = find_core_type("cortex-a57", "aarch64")
    assert known is not None
    found = {name: each["value"] for name, each in facts["core"]["found"].items()}
    assert facts["core"]["clock_hz"] == pytest.approx(1.479e9, rel=0.01)
    for name in ("fma_latency", "fma_pipes", "load_pipes", "l1_bytes"):
        assert found[name] == pytest.approx(getattr(known, name), rel=0.1), name

    report = tmp_path / "report.json"
    about = {"schema": SCHEMA, "board_type": kind.name, "at": "now", "simulated": True}
    report.write_text(json.dumps(about | {"facts": facts}))
    [fitted] = calibrate([report])
    assert fitted.constants is not None
    assert (fitted.core, fitted.simulated, fitted.constants.runs) == ("cortex-a57", True, 7)
    wait_cycles, crowding = fitted.constants.after
    assert wait_cycles == pytest.approx(WAIT_CYCLES, abs=1)
    assert crowding == pytest.approx(CROWDING, abs=0.1)
    assert fitted.constants.errors_before[0] > 0.2
    assert fitted.constants.errors_after[1] < 0.05

    folder = fitted.write(tmp_path / "fitted").parent
    with core_types(folder):
        core, [known] = load_core("cortex-a57"), [each for each in load_core_types() if each.name == "cortex-a57"]
        assert core is not None
        assert known.pipeline is not None
        assert (core["wait_cycles"], core["crowding"]) == fitted.constants.after
        assert (known.pipeline.wait_cycles, known.pipeline.crowding) == fitted.constants.after
        assert core_of(kind.target.to_tvm()).region_s == fitted.measured["region_s"] == found["region_s"]
        assert known.sources[-1] == "certificate of a simulated jetson-nano, now"
