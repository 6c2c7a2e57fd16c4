"""A Ray of our own cannot be reached from outside: what calls it runs code."""

from __future__ import annotations

import ipaddress
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from farm.campaign.engine import ray_calls

# In a process of its own: a test session may have a Ray already.
_PROGRAM = """
import json, os, psutil, ray
from farm.campaign.engine.ray_calls import ray_running
with ray_running(1):
    found, words = [], []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            words += process.cmdline()
            found += [each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"]
        except psutil.Error:
            pass
    config = ray._private.worker.global_worker.core_worker.get_job_config()
    folders = [os.getcwd(), *config.py_driver_sys_path]
print(json.dumps([found, words, folders]))
"""
_STRANGER = """
import os, subprocess, sys
import ray
from farm.campaign.engine.ray_calls import ray_running
os.environ["RAY_AUTH_MODE"] = "disabled"  # what a user has set is for clusters of theirs
os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = '{"runtime_env": {"env_vars": {"A": "B"}}, "metadata": {}}'
ask = "import sys; from ray._raylet import GcsClient; print('in', GcsClient(address=sys.argv[1]).get_all_node_info())"
with ray_running(1):
    address = ray.get_runtime_context().gcs_address
    for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        command = [sys.executable, "-c", ask, address]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | token)
        print("in" if done.stdout.startswith("in") else "oken" in done.stderr)
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert not ray.get_runtime_context().runtime_env
"""
# Another user, if this one may become one, moves a socket away and listens under its name.
_OTHER_USER = """
import json, os, pathlib, socket
import ray
from farm.campaign.engine.ray_calls import ray_running

def take_over(path):
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        os.rename(path, f"{path}.old")
        socket.socket(socket.AF_UNIX).bind(str(path))
    except PermissionError:
        os._exit(13)
    os._exit(0)

with ray_running(1):
    path = pathlib.Path(ray.nodes()[0]["RayletSocketName"])
    folders = [each.stat() for each in path.parents]
    closed = [each.st_uid == os.getuid() and not each.st_mode & 0o077 for each in folders]
    code = 13
    if os.getuid() == 0:
        child = os.fork() or take_over(path)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([any(closed), code]))
"""


@pytest.mark.core
def test_a_ray_of_our_own_listens_on_loopback_alone(tmp_path: pathlib.Path) -> None:
    """No process of Ray's has a port open on an address that another machine could reach; none is there for nothing.
    Its workers look for no modules in the folder of the command, which goes on there.
    """
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True, cwd=tmp_path)
    found, words, (folder, *workers) = json.loads(done.stdout.splitlines()[-1])
    assert folder == str(tmp_path)
    assert folder not in workers
    assert not [word for word in words if word.endswith(("log_monitor.py", "monitor.py", "dashboard.py"))]
    addresses = [ipaddress.ip_address(text) for text in found]
    assert addresses
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    assert all(address.is_loopback for address in plain), plain


@pytest.mark.core
def test_a_ray_of_our_own_lets_in_nobody_without_its_token() -> None:
    """Other users of this machine reach loopback too: without the token, or with another one, they are turned away. Nor
    has it anything of the Ray job that it was started in.
    """
    done = subprocess.run([sys.executable, "-c", _STRANGER], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.split()[-2:] == ["True", "True"], done.stderr[-2000:]


def test_other_users_do_not_reach_the_sockets_of_a_ray_of_our_own() -> None:
    """Ray opens its own folders to everybody: one around them does not let another user in, who tries it."""
    done = subprocess.run([sys.executable, "-c", _OTHER_USER], capture_output=True, text=True, timeout=150, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 13]


def test_rays_socket_names_fit_wherever_its_folder_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes 107 characters; a temporary folder whose name is too long for that is not taken."""
    session = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    roots = [pathlib.Path("/tmp") / ("z" * size) for size in range(8, 60)]
    monkeypatch.setattr(os, "getpid", lambda: 4194304)
    chosen = []
    for root in roots:
        root.mkdir()
        try:
            monkeypatch.setattr(tempfile, "tempdir", str(root))
            with ray_calls._folder() as folder:
                chosen.append(root in folder.parents)
                assert len(str(folder / session)) <= 107
        finally:
            root.rmdir()
    assert chosen == sorted(chosen, reverse=True)
    assert any(chosen)


def test_folders_of_other_users_are_left_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead farm of ours left is removed; a link, and another user's folder are not even looked into."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_calls, "_LONGEST_FOLDER", 1000)
    ours, link, theirs = (tmp_path / f"farm-ray-999999999-{name}" for name in ("ours", "link", "theirs"))
    ours.mkdir()
    (tmp_path / "precious").mkdir()
    link.symlink_to(tmp_path / "precious")
    theirs.mkdir()
    if os.getuid() == 0:
        os.chown(theirs, 65534, 65534)
    with ray_calls._folder():
        assert not ours.exists()
        assert link.is_symlink()
        assert theirs.exists() == (os.getuid() == 0)
