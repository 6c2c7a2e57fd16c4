"""A Ray of our own cannot be reached from outside: what calls it runs code."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys

# In a process of its own: a test session may have a Ray already.
_PROGRAM = """
import json, psutil
from farm.campaign.engine_ray import ray_running
with ray_running(1):
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            found += [each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"]
        except psutil.Error:
            pass
print(json.dumps(found))
"""


def test_a_ray_of_our_own_listens_on_loopback_alone() -> None:
    """No process of Ray's has a port open on an address that another machine could reach."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=150, check=True)
    addresses = [ipaddress.ip_address(text) for text in json.loads(done.stdout.splitlines()[-1])]
    assert addresses
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    assert all(address.is_loopback for address in plain), plain
