"""Follow docs/tutorial.md as it is written: its files and commands, and the pictures of what commands printed.

`tutorial.py [--pictures FOLDER]` in a FARM_HOME of its own, made for the run. A block of YAML whose first line names a
file is that file; each line of a block of `sh` is a command of the farm; a picture right after a block is of its last
command's output. tests/acceptance/test_tutorial.py reads the same steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import io
import os
import pathlib
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
_TIMEOUT_S = 600.0
_COLUMNS = 132
_BLOCK = re.compile(r"(?ms)^```(sh|yaml)\n(.*?)^```\n(?:!\[[^\]]*\]\(images/([\w-]+\.svg)\))?")
_THEME = TerminalTheme(
    (255, 255, 255),
    (36, 41, 46),
    [
        (36, 41, 46),
        (179, 29, 40),
        (34, 134, 58),
        (176, 136, 0),
        (0, 92, 197),
        (111, 66, 193),
        (27, 124, 131),
        (88, 96, 105),
    ],
)


@dataclasses.dataclass(frozen=True)
class File:
    """A file that the reader writes."""

    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """Words after `farm`; `picture` is of what they print."""

    words: tuple[str, ...]
    picture: str | None = None


def read_steps(page: str) -> list[File | Command]:
    """Return the steps of a reader of the page, in order. Raises ValueError for a block that is neither."""
    steps: list[File | Command] = []
    for kind, text, picture in _BLOCK.findall(page):
        lines = text.splitlines()
        if kind == "yaml":
            if not re.fullmatch(r"# [\w./-]+", lines[0]):
                raise ValueError(f"a block of YAML begins with no path: {lines[0]!r}")
            steps.append(File(lines[0][2:], text))
            continue
        for line in lines:
            first, *words = shlex.split(line, comments=True)
            if first != "farm":
                raise ValueError(f"no command of the farm: {line!r}")
            steps.append(Command(tuple(words), picture or None if line == lines[-1] else None))
    return steps


def run(words: tuple[str, ...], folder: pathlib.Path, environment: dict[str, str]) -> str:
    """Run a command and return its output on a terminal. Raises SystemExit with the output where it fails."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _COLUMNS, 0, 0))
    printed = io.BytesIO()

    def read() -> None:
        # Reading ends by an error once the other end is closed (pty(7)).
        while True:
            try:
                if not (some := os.read(ours, 65536)):
                    return
            except OSError:
                return
            printed.write(some)

    command = [str(pathlib.Path(sys.executable).with_name("farm")), *words]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=its, stderr=said
        ) as process:
            os.close(its)
            reader = threading.Thread(target=read)
            reader.start()
            try:
                code = process.wait(_TIMEOUT_S)
            finally:
                process.kill()
                # What the command left running may hold the terminal.
                reader.join(5.0)
        if code:
            said.seek(0)
            raise SystemExit(f"farm {shlex.join(words)} ended with {code}: {said.read().decode(errors='replace')}")
    return printed.getvalue().decode()


def draw(words: tuple[str, ...], printed: str) -> str:
    """Draw a command and its output as SVG, in fonts that the reader has: Rich's own template fetches one."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), legacy_windows=False)
    console.print(Text(f"$ farm {shlex.join(words)}", style="bold"))
    console.print(Text.from_ansi(printed.replace("\r\n", "\n").rstrip()))
    svg = console.export_svg(title="", theme=_THEME, unique_id="t", font_aspect_ratio=0.602)
    svg = re.sub(r"(?s)\s*@font-face \{.*?\}", "", svg)
    return re.sub(r"Fira Code(?=,)", "DejaVu Sans Mono, Menlo, Consolas", svg)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=pathlib.Path, help="the folder in which pictures are written")
    pictures = parser.parse_args().pictures
    began = time.monotonic()
    # Short: Ray's sockets lie below it, and a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="fd-", dir="/tmp") as name:
        folder = pathlib.Path(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FARM_")}
        environment |= {"FARM_HOME": str(folder / "home"), "TERM": "xterm-256color"}
        try:
            for step in read_steps(PAGE.read_text(encoding="utf-8")):
                if isinstance(step, File):
                    (folder / step.path).write_text(step.text, encoding="utf-8")
                    continue
                printed = run(step.words, folder, environment).replace(str(folder), "~")
                if step.picture and pictures:
                    (pictures / step.picture).write_text(draw(step.words, printed), encoding="utf-8")
        finally:
            run(("down", "--force"), folder, environment)
    print(f"followed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
