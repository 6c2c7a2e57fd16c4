"""Options that several commands share, and how they are read."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sqlite3
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from farm import settings as farm_settings
from farm import store as farm_store
from farm.campaign.engine import control
from farm.cli import output
from farm.errors import UnavailableError, UsageError
from farm.inventory import fleet_addresses
from farm.models import inputs as model_inputs
from farm.models import lengths
from farm.models import source as model_source
from farm.points import values
from farm.processes import machine
from farm.settings import Settings
from farm.units import DURATION_EXAMPLES, parse_duration_s, parse_period_s
from farm.values import Ssh

if TYPE_CHECKING:
    from farm.models.inputs import InputSpec
    from farm.models.source import ModelSource
    from farm.store import Store

T = TypeVar("T")
# For latencies of an inference, where minutes would confuse.
LATENCIES = "20ms, 1.5s"
Json = output.Json
Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX or TFLite file, or a name from `farm model zoo`.")]
Trials = Annotated[int, typer.Option("--trials", metavar="N", help="Number of candidates to measure.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Leave out algorithms that round worse than the model as it stands.")
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="float32|bf16|bf16-all|fp16",
        help="Weights of products and convolutions as they are; in 16 bits where that is predicted to be faster; all "
        "that can be in 16 bits, for a smaller library; or weights and arithmetic in 16 bits, on Arm cores that can "
        "and on GPUs.",
    ),
]
Device = Annotated[str, typer.Option("--device", metavar="cpu|gpu", help="Processor or GPU of the board.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME=1,3,224,224", help="Shape of an input that the model leaves open; repeatable."
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        min=1,
        help="Batch size: the first dimension of all inputs, also where the model says 1.",
    ),
]
TrustModel = Annotated[
    bool, typer.Option("--trust-model", help="Read a program of torch.export, which can run code of the file's author.")
]
NONE = "none"
Deadline = Annotated[str, typer.Option("--deadline", metavar="33ms|none", help="Upper limit for the median latency.")]
MaxPower = Annotated[str, typer.Option("--max-power", metavar="7.5W|none", help="Upper limit for power.")]
Aim = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="energy|latency|power|edp|wall-…",
        help="Quantity to minimise; wall-energy, wall-power, …: by an external meter.",
    ),
]
Period = Annotated[
    str,
    typer.Option(
        "--period",
        metavar="33ms|30fps|none",
        help="Time between two inputs, as of a camera: minimises the mean power of inference and idle time.",
    ),
]

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="'NAME=EXPRESSION, more|less, UNIT'",
        help="Number in the program's output: JMESPath, or a regular expression with one group; repeatable.",
    ),
]
Files = Annotated[
    list[Path] | None, typer.Option("--file", metavar="PATH", help="File that is sent along; repeatable.")
]
From = Annotated[
    str, typer.Option("--from", metavar="REGEX", help="Line of the output from which time and power count.")
]
Until = Annotated[str, typer.Option("--until", metavar="REGEX", help="Line of the output up to which they count.")]
Shell = Annotated[bool, typer.Option("--shell", help="Run the program by the board's /bin/sh.")]


def read_duration_s(
    option: str, text: str, examples: str = DURATION_EXAMPLES, parse: Callable[[str], float] = parse_duration_s
) -> float:
    """Return seconds above 0. Raises UsageError that names the option and gives `examples`."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}", f"Examples: {examples}.") from error


def spread(
    parameter: str, group: Callable[..., Any], annotations: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the fields of a dataclass as options, in the place of one parameter.

    The fields are typer's options by their annotations, or by `annotations`; their defaults are the options' defaults.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        fields = annotations or typing.get_type_hints(group, include_extras=True)
        defaults = group()

        @functools.wraps(function)
        def carried_out(*values: Any, **options: Any) -> T:
            chosen = group(**{name: options.pop(name) for name in fields})
            return function(*values, **{parameter: chosen}, **options)

        signature = inspect.signature(function, eval_str=True)
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, name), annotation=option)
            for name, option in fields.items()
        ]
        own = [each for each in signature.parameters.values() if each.name != parameter]
        # Arguments come first, the command's own options last.
        at = sum(each.default is inspect.Parameter.empty for each in own)
        own = [*own[:at], *parameters, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own[at:])]
        carried_out.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return carried_out

    return decorate


def _list_names(table: str) -> Callable[[str], list[str]]:
    """Return what a shell asks for names that begin so: those in the store, which is neither made nor upgraded."""

    def list_names(incomplete: str) -> list[str]:
        location = farm_settings.load().store_location
        with contextlib.suppress(sqlite3.Error):
            if isinstance(location, Path) and location.is_file():
                uri = f"{location.absolute().as_uri()}?mode=ro"
                with contextlib.closing(sqlite3.connect(uri, 0.1, uri=True)) as connection:
                    rows = connection.execute(f"SELECT name FROM {table} ORDER BY name")  # noqa: S608 - one of ours
                    return [name for (name,) in rows if str(name).startswith(incomplete)]
        return []

    return list_names


complete_board, complete_campaign = _list_names("boards"), _list_names("fleet_campaigns")
Boards = Annotated[
    list[str],
    typer.Argument(metavar="NAME…", help="Boards, as `farm board list` names them.", autocompletion=complete_board),
]


def require_trials(trials: int) -> int:
    """Raise UsageError for a budget below one trial."""
    if trials <= 0:
        raise UsageError(f"--trials must be at least 1, not {trials}")
    return trials


def read_model(
    text: str, shapes: list[str] | None, batch: int | None = None, trusted: bool = False
) -> tuple[ModelSource, tuple[InputSpec, ...]]:
    """Return the named model with every input's shape settled, the first dimension `batch` where given. Raises
    UsageError.
    """
    given = model_inputs.parse_shapes(shapes or [])
    source = model_source.resolve_model(text, trusted)
    if batch is not None:
        batched, inputs = lengths.set_batch(source, shapes or [], batch)
        return source.changed(batched), inputs
    model = source.load()
    return source, model_inputs.resolve_inputs(model_inputs.read_inputs(model), given, model)


def open_store(settings: Settings | None = None) -> farm_store.Store:
    """Open the farm's store. Raises UsageError for an invalid location, UnavailableError."""
    return farm_store.Store((settings or farm_settings.load()).store_location)


@contextlib.contextmanager
def open_store_to_show() -> Iterator[Store]:
    """The store for a command that shows campaigns or sweeps: those whose process is gone are marked so first.

    A store that cannot be written, as on a full disk, is shown as it stands.
    """
    with open_store() as store:
        with contextlib.suppress(UnavailableError):
            control.close_abandoned(store)
            machine.close_abandoned_sweeps(store)
        yield store


def read_ssh(text: str, key_file: str = "", host_key: str = "") -> Ssh:
    """Parse `[user@]host[:port]`, with an IPv6 address in brackets; OpenSSH's configuration has the default user.

    Raises UsageError.
    """
    user, at, where = text.rpartition("@")
    host, port = where, "22"
    if where.startswith("["):
        host, _, tail = where[1:].partition("]")
        port = tail.removeprefix(":") or "22"
    elif where.count(":") == 1:
        host, _, port = where.partition(":")
    try:
        if at and not user:
            raise ValueError(f"{text!r} lacks the user before the @")
        return Ssh(
            host=fleet_addresses.parse_address(host),
            user=fleet_addresses.parse_user(user) if at else "",
            port=fleet_addresses.parse_port(port),
            identity_file=key_file,
            host_key=host_key,
        )
    except ValueError as error:
        raise UsageError(f"--ssh: {error}", "It is HOST, USER@HOST or USER@HOST:PORT.") from error


def read_goal(goal: values.Goal, deadline: str, max_power: str, objective: str, period: str = "") -> values.Goal:
    """Return `goal` with the given limits; `none` removes one. Raises UsageError."""
    return goal.settle(
        objective,
        _read(deadline, goal.deadline_s, lambda: read_duration_s("--deadline", deadline, LATENCIES)),
        _read(max_power, goal.max_power_w, lambda: _read_watts(max_power)),
        _read(period, goal.period_s, lambda: read_duration_s("--period", period, "33ms, 30fps", parse_period_s)),
        bool(period),
    )


def _read(text: str, before: float | None, parse: Callable[[], float]) -> float | None:
    if not text:
        return before
    return None if text.strip().lower() == NONE else parse()


def _read_watts(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(m?w)?", text.strip().lower())
    if found and not found[2]:
        raise UsageError(f"--max-power {text!r} has no unit", f"Say {text.strip()}W or {text.strip()}mW.")
    watts = float(found[1]) * (1e-3 if found[2] == "mw" else 1.0) if found else 0.0
    if not watts > 0:
        raise UsageError(f"--max-power {text!r} is no power", "Examples: 7.5W, 800mW.")
    return watts
