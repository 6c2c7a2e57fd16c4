"""A Ray cluster on this machine whose nodes come and go by Ray's own autoscaler, and a token that lets one in."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest
import ray
from ray._private import node, parameter

from farm.campaign.engine import ray_calls

RAY = pathlib.Path(sys.executable).parent / "ray"
# A machine of an autoscaler's offers it, and no other.
BUILDER = "builder"
_HEAD = "f" * 51 + "0" * 5  # whose nodes are numbered from there, as in Ray's own tests
# Ray's own would notice a machine that died after some 15 s.
_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
_COMMON = ("--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0", "--block")
_LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)


def _describe(port: int, most: int) -> dict[str, object]:
    """An autoscaler's configuration: up to `most` nodes with a CPU each, which go after 3 s without use."""
    builder = {"resources": {"CPU": 1, BUILDER: 1, "object_store_memory": 80000000}, "node_config": {}}
    return {
        **{name: [] for name in _LISTS},
        "auth": {},
        "file_mounts": {},
        "docker": {},
        "file_mounts_sync_continuously": False,
        "cluster_name": "tests",
        "max_workers": most,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "external",  # as `fake_multinode`, the defaults of which the wheel lacks
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": _HEAD,
            "launch_multiple": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "builder": {**builder, "min_workers": 0, "max_workers": most},
        },
    }


@contextlib.contextmanager
def with_token() -> Iterator[None]:
    """For the block: a token in the environment, and nodes that listen on loopback alone."""
    with pytest.MonkeyPatch.context() as patch, ray_calls.on_loopback():
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        ray_calls.forget_token()
        try:
            yield
        finally:
            ray.shutdown()
    ray_calls.forget_token()


@contextlib.contextmanager
def autoscaling_cluster(most: int) -> Iterator[str]:
    """The address of a head without CPUs, our own node, which has up to `most` others when they are wanted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        config = pathlib.Path(folder, "cluster.json")
        config.write_text(json.dumps(_describe(port, most)))
        own = {
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
        }
        command = [str(RAY), "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=0"]
        command += [*_COMMON, "--include-dashboard=false", "--dashboard-agent-listen-port=0"]
        command += [f"--temp-dir={folder}", f"--autoscaling-config={config}", f"--system-config={json.dumps(_SOON)}"]
        with _started(command, folder, own):
            _wait_for(port)
            yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def joined_node(address: str, environment: dict[str, str]) -> Iterator[None]:
    """One more node of the cluster, with one CPU; `ray start` lets none join one on loopback."""
    sizes = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80000000}
    ports = {"min_worker_port": 0, "max_worker_port": 0, "node_manager_port": 0, "dashboard_agent_listen_port": 0}
    where = {"gcs_address": address, "redis_address": address, "node_ip_address": "127.0.0.1"}
    parameters = parameter.RayParams(**sizes, **ports, **where, include_log_monitor=False, env_vars=environment)
    joined = node.Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
    try:
        yield
    finally:
        joined.kill_all_processes(check_alive=False, allow_graceful=False)


@contextlib.contextmanager
def _started(command: list[str], folder: str, environment: dict[str, str]) -> Iterator[None]:
    with pathlib.Path(folder, "said.txt").open("w", encoding="utf-8") as said:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=said, stderr=said)
    try:
        yield
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        # Nodes of the autoscaler's, whose processes are orphans once it has ended, have the folder in theirs.
        for each in (*family, *_find_mentioning(folder)):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                each.send_signal(signal.SIGKILL)
        process.wait()


def _find_mentioning(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(folder in argument for argument in process.cmdline()):
                found.append(process)
    return found


def _wait_for(port: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert time.monotonic() < deadline, "Ray's head did not come up"
        else:
            return
