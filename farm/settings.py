"""Every setting: its default, its environment variable and its meaning. A command's flags override them."""

from __future__ import annotations

import dataclasses
import math
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.errors import UsageError

# A SQLite file, or the URL of a PostgreSQL database.
StoreLocation = Path | str

STORE_FILE = "farm.db"
_LAST_PORT = 65535
_FOLDERS = ("FARM_HOME", "FARM_SHARED", "FARM_BOARD_TYPES", "FARM_CORE_TYPES")


def _setting(default: Any, env: str, meaning: str, zero: bool = False, known: tuple[str, ...] = ()) -> Any:
    """`zero`: 0 is allowed in addition to positive values; `known`: the only values."""
    metadata = {"env": env, "meaning": meaning, "zero": zero or default == 0, "known": known}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings. Times are in seconds, sizes in bytes."""

    home: str = _setting(
        "", "FARM_HOME", "folder of the store, caches and reports; default: the platform's data folder"
    )
    store: str = _setting(
        "", "FARM_STORE", "postgresql://USER@HOST/DATABASE, a store for several hosts; default: farm.db in FARM_HOME"
    )
    tracker_port: int = _setting(
        9190, "FARM_TRACKER_PORT", "first port tried for the local tracker; a busy one is skipped"
    )
    metrics_port: int = _setting(
        9464, "FARM_METRICS_PORT", "first port tried for the services' metrics; a busy one is skipped, 0: none", True
    )
    probe_interval_s: float = _setting(
        600.0, "FARM_PROBE_INTERVAL_S", "how often good boards that are idle are probed; 0: only those in doubt", True
    )
    ssh_key: str = _setting(
        "", "FARM_SSH_KEY", "private key shown to boards registered without one; default: OpenSSH's usual files"
    )
    ssh_config: str = _setting(
        "~/.ssh/config", "FARM_SSH_CONFIG", "OpenSSH's configuration: aliases, ProxyJump, users, ports, keys; default"
    )
    isolation: str = _setting(
        "exclusive",
        "FARM_ISOLATION",
        "how the host keeps out of the way where it is the board: exclusive (phases), own-core, or none",
        known=("exclusive", "own-core", "none"),
    )
    batch: int = _setting(8, "FARM_BATCH", "candidates given to one workload at a time")
    warmup: int = _setting(4, "FARM_WARMUP", "trials that every workload gets before gains are compared")
    population: int = _setting(
        64, "FARM_POPULATION", "schedules that evolve for one batch where no prediction orders them"
    )
    generations: int = _setting(3, "FARM_GENERATIONS", "generations that they evolve for")
    seed: int = _setting(0, "FARM_SEED", "seed of the search, the cost model and the inputs")
    build_workers: int = _setting(0, "FARM_BUILD_WORKERS", "compiler processes; 0: one per core")
    ray_address: str = _setting(
        "", "FARM_RAY_ADDRESS", "HOST:PORT of a Ray cluster whose nodes build for campaigns; default: a Ray of our own"
    )
    ray_builder_label: str = _setting(
        "",
        "FARM_RAY_BUILDER_LABEL",
        "resource of Ray's that machines of the cluster offer on which builds may run; default: all that offer CPUs",
    )
    ray_max_builders: int = _setting(
        32, "FARM_RAY_MAX_BUILDERS", "most compilers that are asked of the cluster at a time, each with a CPU"
    )
    ray_idle_s: float = _setting(
        60.0, "FARM_RAY_IDLE_S", "after so long without a build a compiler is given back to the cluster"
    )
    shared: str = _setting(
        "",
        "FARM_SHARED",
        "folder that all hosts of a shared store see, for compiled candidates and campaigns' models, by content; "
        "default: what was compiled is kept in FARM_HOME, models are where they were",
    )
    build_timeout_s: float = _setting(20.0, "FARM_BUILD_TIMEOUT_S", "deadline of one build")
    build_recycle_count: int = _setting(
        200, "FARM_BUILD_RECYCLE_COUNT", "builds after which a compiler process is replaced"
    )
    build_recycle_bytes: int = _setting(
        2 << 30, "FARM_BUILD_RECYCLE_BYTES", "resident size at which it is replaced earlier"
    )
    measure_number: int = _setting(1, "FARM_MEASURE_NUMBER", "least calls per latency sample")
    measure_repeat: int = _setting(3, "FARM_MEASURE_REPEAT", "latency samples per trial")
    measure_min_repeat_s: float = _setting(0.02, "FARM_MEASURE_MIN_REPEAT_S", "least duration of one sample")
    measure_timeout_s: float = _setting(10.0, "FARM_MEASURE_TIMEOUT_S", "deadline of one trial on the board")
    measure_memory_bytes: int = _setting(2 << 30, "FARM_MEASURE_MEMORY_BYTES", "memory a candidate may allocate")
    model_runs: int = _setting(
        60, "FARM_MODEL_RUNS", "timed runs of a whole model, per variant; of untuned code 15 at most"
    )
    model_timeout_s: float = _setting(120.0, "FARM_MODEL_TIMEOUT_S", "deadline of one block of such runs")
    model_memory_bytes: int = _setting(8 << 30, "FARM_MODEL_MEMORY_BYTES", "memory a whole model may allocate")

    @property
    def home_path(self) -> Path:
        """Return the state folder; it is not created here."""
        if self.home:
            return Path(self.home).expanduser().absolute()
        data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(data).expanduser().absolute() / "tvm-farm"

    @property
    def builds_path(self) -> Path:
        """The folder of compiled candidates; not created here."""
        return (Path(self.shared).expanduser().absolute() if self.shared else self.home_path / "cache") / "builds"

    @property
    def models_path(self) -> Path | None:
        """The shared folder of campaigns' models by content; None without one."""
        return Path(self.shared).expanduser().absolute() / "models" if self.shared else None

    def share_linker_cache(self) -> None:
        """Keep the linker's first-use cache in the home, for this process and its children."""
        os.environ.setdefault("FARM_ZIG_CACHE", str(self.home_path / "cache" / "zig"))

    @property
    def store_location(self) -> StoreLocation:
        """The store's location. Raises UsageError."""
        if not self.store:
            return self.home_path / STORE_FILE
        if isinstance(location := parse_store(self.store), Path):
            raise UsageError(
                f"FARM_STORE={self.store!r} is no URL of a PostgreSQL database",
                "It is for postgresql://USER@HOST/DATABASE alone; a store in a file is farm.db in FARM_HOME.",
            )
        return location


def parse_store(text: str) -> StoreLocation:
    """Parse a store's path or URL: `sqlite:///PATH`, `postgresql://…`. Raises UsageError."""
    scheme, found, rest = text.partition("://")
    if not found or scheme == "sqlite":
        path = Path(rest.removeprefix("/") if found else text).expanduser().absolute()
        if not path.name or path.is_dir():
            raise UsageError(
                f"{text!r} names no file", "Give the path of a farm.db, or postgresql://USER@HOST/DATABASE."
            )
        return path
    if scheme not in ("postgresql", "postgres"):
        raise UsageError(f"a store cannot be at {scheme}://…", "Give a path, or postgresql://USER@HOST/DATABASE.")
    try:
        parts = urllib.parse.urlsplit(text)
        secret = parts.password is not None or "password=" in parts.query
        parts.port  # noqa: B018 - raises where there is none such
    except ValueError as error:
        raise UsageError(f"{text!r} is no URL: {error}") from error
    if secret:
        # Settings are stored with campaigns, and a URL is shown in many places.
        raise UsageError(
            "the URL of a store must not hold a password",
            "Put it into ~/.pgpass, as HOST:PORT:DATABASE:USER:PASSWORD with mode 0600, or into PGPASSWORD.",
        )
    return f"postgresql://{rest}"


def load(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. Raises UsageError naming the variable with an invalid value."""
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        text = environment.get(field.metadata["env"])
        if text is not None:
            if text and field.metadata["env"] in _FOLDERS:
                text = _make_absolute(text)
            values[field.name] = _parse(field, text)
    if environment.get("FARM_VIRTUAL_CODE", "emulated") != "emulated":
        raise UsageError(
            "FARM_VIRTUAL_CODE is gone: virtual boards run the code of their own type",
            "Unset it. Code of this machine is tuned with --board-type local.",
        )
    settings = Settings(**values)
    for env, port in (("FARM_TRACKER_PORT", settings.tracker_port), ("FARM_METRICS_PORT", settings.metrics_port)):
        if port > _LAST_PORT:
            raise UsageError(f"{env}={port} is no port: they end at 65535")
    return settings


def find_folders() -> dict[str, str]:
    """Return the variables that name a folder, with absolute paths: for children that work in another folder."""
    return {name: _make_absolute(os.environ[name]) for name in _FOLDERS if os.environ.get(name)}


def _make_absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())


def _parse(field: dataclasses.Field[Any], text: str) -> Any:
    default: Any = field.default
    env, kind = field.metadata["env"], type(default)
    known: tuple[str, ...] = field.metadata["known"]
    if known and text not in known:
        raise UsageError(f"{env}={text!r} is unknown; known: {', '.join(known)}")
    if kind is str:
        return text
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"{env}={text!r} is not {'a whole number' if kind is int else 'a number'}") from None
    if not math.isfinite(value):
        raise UsageError(f"{env}={text!r} must be finite")
    zero: bool = field.metadata["zero"]
    if value < 0 or (value == 0 and not zero):
        raise UsageError(f"{env}={text!r} must be {'>= 0' if zero else '> 0'}")
    return value
