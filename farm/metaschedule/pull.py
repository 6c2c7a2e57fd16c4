"""Records from elsewhere: a file, a URL, a folder, or those that come with the farm. `exchange` checks and parses."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import tempfile
import threading
import urllib.parse
from pathlib import Path

import requests
import urllib3

from farm.errors import UnavailableError, UsageError
from farm.inventory.documents import require_inventory_folder
from farm.metaschedule import exchange
from farm.store.imports import RecordBundle

# The records that come with the farm, for models of the zoo on virtual boards: `deploy/release/shipped.py`.
SHIPPED, SHIPPED_FILE = "zoo", "zoo_records.json.gz"
# Connecting, and each pause of a download; and all of it.
_TIMEOUT_S, _DEADLINE_S = 20.0, 600.0
_MOST_BYTES = 64 << 20


def read_source(source: str) -> tuple[RecordBundle, str]:
    """Return the records of a source and its name: `zoo`, a URL, a file, or a folder that `farm record export` wrote.

    A URL may end with `#sha256=…`, which is checked. Raises UsageError, UnavailableError where nothing answers.
    """
    if source == SHIPPED:
        path = require_inventory_folder() / SHIPPED_FILE
        return exchange.read_file(path, is_ours=True), "the farm's own records of the zoo"
    if source.startswith(("http://", "https://")):
        address, _, digest = source.partition("#sha256=")
        with tempfile.NamedTemporaryFile(prefix="farm-records-") as file:
            path = Path(file.name)
            path.write_bytes(_download(address, digest))
            with exchange.blamed(address):
                return exchange.read_file(path), address
    path = Path(source)
    if path.is_dir():
        bundle = exchange.read_folder(path)
        if bundle is None:
            raise UsageError(f"{path} has only MetaSchedule's files", "`farm record import` takes them.")
        return bundle, str(path.absolute())
    if not path.is_file():
        raise UsageError(f"there is no {source}", f"Give a file, a folder, a URL, or `{SHIPPED}`.")
    return exchange.read_file(path), str(path.absolute())


class _Session(requests.Session):
    """Follows redirects that stay with the protocol, and none from a public server into a private network."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        target = super().get_redirect_target(resp)
        if target and (why := find_refusal(resp.url, urllib.parse.urljoin(resp.url, target))):
            raise requests.TooManyRedirects(f"it redirects to {target}, {why}")
        return target


def find_refusal(address: str, then: str) -> str:
    """Return why a redirect from an address is not followed; "" for one that is."""
    if urllib.parse.urlsplit(then).scheme != urllib.parse.urlsplit(address).scheme:
        return "which is another protocol"
    return "which is in a private network" if _is_private(then) and not _is_private(address) else ""


def _is_private(address: str) -> bool:
    found = socket.getaddrinfo(urllib.parse.urlsplit(address).hostname, None)
    return any(not ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_global for each in found)


def _download(address: str, digest: str, deadline_s: float = _DEADLINE_S) -> bytes:
    found: list[bytes | str] = []
    # A server that sends a byte now and then ends no wait of a socket.
    thread = threading.Thread(target=lambda: found.append(_fetch(address)), daemon=True)
    thread.start()
    thread.join(deadline_s)
    data = found[0] if found else f"it did not arrive within {deadline_s:g} s"
    if isinstance(data, str):
        raise UnavailableError(f"cannot fetch {address}: {data}", "Nothing was imported.")
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{address} is larger than {_MOST_BYTES >> 20} MiB")
    if digest and (own := hashlib.sha256(data).hexdigest()) != digest.lower():
        raise UsageError(f"{address} has the SHA-256 {own}, not {digest[:64]}", "Nothing was imported.")
    return data


def _fetch(address: str) -> bytes | str:
    """Return the data, or why there are none."""
    try:
        with _Session() as session, session.get(address, timeout=_TIMEOUT_S, stream=True) as answer:
            if not answer.ok:
                return f"the server answers {answer.status_code} {answer.reason}"
            return bytes(answer.raw.read(_MOST_BYTES + 1, decode_content=True))
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        return getattr(first, "strerror", None) or str(first)
