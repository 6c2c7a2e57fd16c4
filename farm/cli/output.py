"""How commands print: documents to stdout, everything else to stderr, errors as exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich import markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from farm import backup, foreign, settings
from farm.errors import FarmError
from farm.services import checks
from farm.types import documents

FOLDER = "docs/howto"
# The longest name that begins a module's counts. What serves everything (store, settings, units) says nothing of what
# the command was about: then its caller does.
PAGES: Mapping[str, str] = json.loads(Path(__file__).with_name("howto.json").read_text(encoding="utf-8"))
INTERRUPTED = 130
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
# What a command returns that yields a document; see `command`.
Document = Generator[Any, None, None]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
# Seconds; larger stores are checked on request only.
_QUICKLY_CHECKED_BYTES = 256 << 20
# Files and pipes have no width, unless COLUMNS says one: a row is a line.
_PIPE_WIDTH = 10_000
_MARKS = {
    checks.Level.OK: "[green]ok  [/]",
    checks.Level.WARNING: "[yellow]warn[/]",
    checks.Level.FAILED: "[red]FAIL[/]",
    checks.Level.NOT_TRIED: "[dim]–   [/]",
}


def find_page(error: BaseException) -> str:
    """Return the how-to for an error; empty where there is none, or its text names a page."""
    if "docs/" in str(error):
        return ""
    modules, step = [], error.__traceback__
    while step is not None:
        modules.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    for module in reversed(modules):
        if prefixes := [each for each in PAGES if module.startswith(each)]:
            return f"{FOLDER}/{PAGES[max(prefixes, key=len)]}.md"
    return ""


@dataclasses.dataclass(frozen=True)
class Failed:
    """A document after which a command ends with an error or an exit code."""

    document: Any
    end: FarmError | int | None


class _Console(Console):
    """A console that shows control characters as text, and obeys only rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console`. Every text passes here; rich's own controls are no text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else foreign.show_controls(text), style, control)


def make_console(stream: TextIO, **own: Any) -> Console:
    """Return a console for a stream: as wide as its terminal, or as `COLUMNS` where it is set."""
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdecimal() else _PIPE_WIDTH
    return _Console(highlight=False, emoji=False, width=width, **own)


stderr = make_console(sys.stderr, stderr=True)
stdout = make_console(sys.stdout)


def print_table(table: RenderableType) -> None:
    """Print a table on stdout; in a file its lines end with their last letter."""
    if stdout.is_terminal:
        stdout.print(table)
        return
    with stdout.capture() as drawn:
        stdout.print(table)
    for line in drawn.get().splitlines():
        stdout.out(line.rstrip(), highlight=False)


def to_stream(stream: TextIO, data: bytes) -> None:
    """Write untrusted bytes as they are; to a terminal with control characters shown."""
    stream.flush()
    if stream.isatty():
        data = foreign.show_controls(data.decode(errors="replace")).encode()
    stream.buffer.write(data)
    stream.flush()


def print_json(document: Any) -> None:
    """Print a JSON document on stdout; models of `farm.types` in it are documents, too."""
    print(json.dumps(document, indent=2, allow_nan=False, default=lambda model: model.model_dump(mode="json")))


def say(*texts: str) -> None:
    """Sentences on stdout: on a terminal broken between words, in a file a line each.

    What is to be copied, a command or a path, is printed as it is.
    """
    for text in texts:
        copied = text.startswith(("    ", "report: "))
        stdout.print(text, soft_wrap=copied or not stdout.is_terminal, markup=False, emoji=False)


def tell(text: str) -> None:
    """Print a line on stderr, with all markup shown as text."""
    stderr.print(text, soft_wrap=True, markup=False)


def note(text: str) -> None:
    """Print one line on stderr about what starts or was decided."""
    stderr.print(f"[bold]•[/] {markup.escape(text)}", soft_wrap=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first SIGINT, SIGTERM or SIGHUP end the block as Ctrl-C does.

    Later ones cannot cut the cleaning up short.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(each, interrupt) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def command(function: Callable[..., Document | None]) -> Callable[..., None]:
    """Give a command `--debug`, and the edge at which its errors become exit codes; see `run`.

    One that yields has `--json`, too: with it the document that it yields is printed, and what follows, which tells
    people the same, is left out.
    """
    yields = inspect.isgeneratorfunction(inspect.unwrap(function))

    @functools.wraps(function)
    def carried_out(*values: Any, debug: bool = False, **options: Any) -> None:
        as_json = options.pop("json", False) if yields else False
        run(lambda: carry_out(function(*values, **options), as_json), debug)

    # Typer reads both: the function's options, and those that all commands have.
    signature = inspect.signature(function, eval_str=True)
    added = {"json": Json} if yields else {}
    last = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in (added | {"debug": Debug}).items()
    ]
    whole = signature.replace(parameters=[*signature.parameters.values(), *last])
    carried_out.__signature__ = whole  # type: ignore[attr-defined]
    return carried_out


def carry_out(told: Document | None, as_json: bool) -> None:
    """Print what a command yields, as JSON or for people, and end as it says."""
    if told is None:
        return
    end: FarmError | int | None = None
    with contextlib.closing(told):
        for document in told:
            if isinstance(document, Failed):
                document, end = document.document, document.end
            if as_json:
                print_json(document)
                break
    if isinstance(end, FarmError):
        raise end
    if end:
        raise SystemExit(end)


def run(work: Callable[[], None], debug: bool) -> None:
    """Run a command's work; exit with the code of its error."""
    # Through the console, so that a warning appears above a live table and not in its middle.
    logging.basicConfig(level=logging.WARNING, handlers=[_ConsoleHandler()])
    try:
        with interruptible():
            try:
                work()
            finally:
                # Flush now, while an error can still be reported: at exit Python would print a traceback.
                sys.stdout.flush()
    except FarmError as error:
        more = f"\n  More: {page}" if (page := find_page(error)) else ""
        _fail(f"{error}{more}", error.exit_code, debug)
    except KeyboardInterrupt:
        _print("interrupted; finished trials are kept")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has gone; that needs no message.
        _drop_stdout()
        raise SystemExit(1) from None
    except OSError as error:
        _drop_stdout()
        where = f"{error.filename}: " if error.filename else ""
        hint = "Is FARM_HOME, --out or the output on a full or read-only disk, or in a folder that is not there?"
        _fail(f"{where}{error.strerror or error}\n  {hint}", 3, debug)
    except Exception as error:  # noqa: BLE001 - edge of the process: a bug of ours; say so, and where to look
        if problem := _find_store_problem():
            hint = "`farm store check` lists what is; `farm store restore FILE` puts a backup in its place."
            _fail(f"the store holds what no farm wrote: {problem}\n  {hint}", 3, debug)
        where = "" if debug else "\n  This is a bug of tvm-farm. Run again with --debug for the traceback."
        _fail(f"{type(error).__name__}: {error}{where}", 1, debug, "internal error")


def _fail(text: str, code: int, debug: bool, kind: str = "error") -> NoReturn:
    if debug:
        traceback.print_exc()
    _print(f"[bold red]{kind}:[/] {markup.escape(text)}")
    raise SystemExit(code) from None


def _find_store_problem() -> str:
    """Say what is wrong with the store: a damaged one makes any command fail in any way."""
    with contextlib.suppress(FarmError, OSError):
        loaded = settings.load()
        location = loaded.store_location
        if isinstance(location, Path) and location.stat().st_size <= _QUICKLY_CHECKED_BYTES:
            return next(iter(backup.check(loaded.home_path)), "")
    return ""


def _print(text: str) -> None:
    # The terminal has gone: only the exit code is left.
    with contextlib.suppress(OSError):
        stderr.print(text, soft_wrap=True)


def holder(lease: documents.LeaseInfo | None) -> str:
    """Say who holds a board, why and since when."""
    if not lease:
        return "–"
    until = f" until {moment(lease.expires_at)}" if lease.kind == "reserved" else ""
    return f"{lease.owner} ({lease.purpose}) since {moment(lease.acquired_at)}{until}"


def moment(seconds: float | None) -> str:
    """Format a time of day."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _drop_stdout() -> None:
    """Discard silently what is buffered for a stdout that takes no more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        with contextlib.suppress(OSError):
            tell(text)


def print_check(check: checks.Check) -> None:
    """Print one check."""
    seconds = f"  ({check.seconds:.1f} s)" if check.seconds >= 0.1 else ""
    line = f"{_MARKS[check.level]} {check.name:<12} {markup.escape(check.detail)}{seconds}"
    stdout.print(line, soft_wrap=not stdout.is_terminal)
    if check.advice and check.level is not checks.Level.OK:
        say(f"  → {check.advice}")
