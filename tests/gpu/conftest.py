"""What the tests on an NVIDIA GPU share: an ordinary agent, with the plug-in built for this machine."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from farm.gpu import code
from farm.measure.asking import AgentAddress
from farm.measure.session import BoardSession
from tests.integration.conftest import Agent, start_agent

__all__ = ["start_agent"]


@pytest.fixture(scope="session")
def gpu(start_agent: Callable[..., Agent], tmp_path_factory: pytest.TempPathFactory) -> Agent:
    """The agent of this machine; fails where there is no GPU that its driver serves."""
    folder: pathlib.Path = tmp_path_factory.mktemp("plugin")
    code.build_plugin(folder, None)
    agent = start_agent("--port", "9600", "--port-end", "9699", "--gpu-folder", str(folder))
    with BoardSession(AgentAddress("127.0.0.1", agent.port), agent.key) as session:
        if "cuda" not in session.description.engine_versions:
            reasons = [note for note in session.description.notes if "GPU" in note]
            pytest.fail(f"this needs a machine with an NVIDIA GPU and its driver: {'; '.join(reasons)}", pytrace=False)
    return agent


@pytest.fixture
def board(gpu: Agent) -> Iterator[BoardSession]:
    with BoardSession(AgentAddress("127.0.0.1", gpu.port), gpu.key) as session:
        yield session
