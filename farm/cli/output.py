"""How commands speak: documents to stdout, everything else to stderr, errors as exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from farm.errors import FarmError
from farm.report import progress as progress_view
from farm.report.progress import Progress

# Without a terminal, one line of progress this often.
_PLAIN_INTERVAL_S = 10.0
INTERRUPTED = 130

# Files and pipes have no width of their own: wide enough that no table is folded there.
_PIPE_WIDTH = 200
stderr = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE_WIDTH)
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], left: Sequence[int] = (0,), empty: str = "") -> None:
    """A table on stdout; `left` columns are text, the others numbers. `empty` is said where there are no rows."""
    if not rows:
        stdout.print(empty)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    stdout.print(table)


class Screen:
    """Notes and progress of a run: a live table on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._printed_at = 0.0
        self._latest: Progress | None = None

    def note(self, text: str) -> None:
        """One line, above the live table where there is one."""
        self._end_live()
        stderr.print(f"[bold]•[/] {text}", soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        """Draw the table anew, or print a line if it is time for one."""
        self._latest = progress
        done = progress.phase == "done"
        if stderr.is_terminal:
            if self._live is None:
                self._live = Live(console=stderr, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(progress_view.draw(progress, stderr.height))
            if done:
                self._end_live()
        elif not done and time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            stderr.print(progress_view.summary_line(progress), soft_wrap=True)
        if done:
            stderr.print(progress_view.draw(progress))

    def close(self) -> None:
        """Give the terminal back."""
        self._end_live()

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first SIGINT, SIGTERM or SIGHUP end the block as Ctrl-C does; later ones cannot cut the cleaning up short."""

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


def run(work: Callable[[], None], debug: bool) -> None:
    """Run a command's work; leave with the exit code that its error stands for."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        work()
    except FarmError as error:
        if debug:
            traceback.print_exc()
        stderr.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        stderr.print("interrupted; finished trials are kept", soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has gone; that is not worth a message.
        raise SystemExit(1) from None
    except OSError as error:
        if debug:
            traceback.print_exc()
        stderr.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)
        stderr.print("  Is FARM_HOME or --out on a full or read-only disk?", soft_wrap=True)
        raise SystemExit(3) from None
    except Exception as error:  # a bug of ours: say so, and where to look
        if debug:
            traceback.print_exc()
        stderr.print(f"[bold red]internal error:[/] {type(error).__name__}: {_escape(str(error))}", soft_wrap=True)
        stderr.print("  This is a bug of tvm-farm. Run again with --debug for the traceback.", soft_wrap=True)
        raise SystemExit(1) from None


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
