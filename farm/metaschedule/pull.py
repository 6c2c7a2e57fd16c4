"""Records from elsewhere: a file, a URL, a folder, or those that come with the farm. `exchange` checks and parses."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import requests

from farm.errors import UnavailableError, UsageError
from farm.inventory.documents import require_inventory_folder
from farm.metaschedule import exchange
from farm.store.imports import RecordBundle

# The records that come with the farm, for models of the zoo on virtual boards: `benchmarks/shipped_records.py`.
SHIPPED, SHIPPED_FILE = "zoo", "zoo_records.json.gz"
# Connecting, and each pause of a download.
_TIMEOUT_S = 20.0
_MOST_BYTES = 64 << 20
_CHUNK = 1 << 20


def read_source(source: str) -> tuple[RecordBundle, str]:
    """Return the records of a source and its name: `zoo`, a URL, a file, or a folder that `farm record export` wrote.

    A URL may end with `#sha256=…`, which is checked. Raises UsageError, UnavailableError where nothing answers.
    """
    if source == SHIPPED:
        return exchange.read_file(require_inventory_folder() / SHIPPED_FILE), "the farm's own records of the zoo"
    if source.startswith(("http://", "https://")):
        address, _, digest = source.partition("#sha256=")
        with tempfile.NamedTemporaryFile(prefix="farm-records-") as file:
            path = Path(file.name)
            _download(address, path, digest)
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


def _download(address: str, path: Path, digest: str) -> None:
    found, size = hashlib.sha256(), 0
    try:
        with requests.get(address, timeout=_TIMEOUT_S, stream=True) as answer, path.open("wb") as file:
            answer.raise_for_status()
            for chunk in answer.iter_content(_CHUNK):
                size += len(chunk)
                if size > _MOST_BYTES:
                    raise UsageError(f"{address} is larger than {_MOST_BYTES >> 20} MiB")
                found.update(chunk)
                file.write(chunk)
    except (requests.RequestException, OSError) as error:
        raise UnavailableError(f"cannot fetch {address}: {error}", "Nothing was imported.") from error
    if digest and found.hexdigest() != digest.lower():
        raise UsageError(f"{address} has the SHA-256 {found.hexdigest()}, not {digest[:64]}", "Nothing was imported.")
