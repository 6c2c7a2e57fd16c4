"""Survey a board and its installation: two read-only scripts, and the parsing of their output.

`plan.py` decides what follows.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from farm.errors import PermanentError
from farm.inventory.board_types import BoardType
from farm.provision.interpreters import LAST_PYTHON, LEAST_PYTHON
from farm.provision.layout import Layout
from farm.provision.shell import BoardShell, join_lines

# For the survey script; a worn SD card is slow.
SURVEY_TIMEOUT_S = 60.0
# The marker of an installation's folder; `scripts.py` describes the files in it.
MARKER = "tvm-farm-board"
# sudo's first message is long; its refusal is in the first lines.
_MAX_REFUSAL = 300
TOOLS = ("awk", "df", "flock", "gzip", "readlink", "sed", "sha256sum", "tar", "timeout")

# By line: the newest known release, its JetPack, and its chips. NVIDIA's archive of Jetson Linux; the table of
# jetson-stats (rbonghi/jetson_stats, jtop/core/jetson_variables.py); OE4T/meta-tegra (38.4.0 is JetPack 7.1).
_LINES = {
    "R28": ((2, 0), "JetPack 3", ("t186", "t210")),
    "R32": ((7, 6), "JetPack 4", ("t186", "t194", "t210")),
    "R34": ((1, 1), "JetPack 5", ("t194", "t234")),
    "R35": ((6, 4), "JetPack 5", ("t194", "t234")),
    "R36": ((5, 0), "JetPack 6", ("t234",)),
    "R38": ((4, 0), "JetPack 7", ("t264",)),
    "R39": ((2, 0), "JetPack 7", ("t234", "t264")),
}
# As in /etc/nv_tegra_release, `# R36 (release), REVISION: 4.7, …`, and as the package nvidia-l4t-core,
# `36.4.7-20250918154033`.
_FILE = re.compile(r"#?\s*R(\d{1,3}) \(release\), REVISION: (\d{1,3})(?:\.(\d{1,3}))?")
_PACKAGE = re.compile(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?:[-~+].*)?")


@dataclasses.dataclass(frozen=True)
class Login:
    """The login on a board, and its service manager.

    `refused` is sudo's message to a user who needs a password. `standing` is the version installed system-wide at the
    usual place, empty during a change; None without one.
    """

    uid: int
    home: str
    may_sudo: bool
    systemd: bool
    refused: str = ""
    standing: str | None = None


@dataclasses.dataclass(frozen=True)
class BoardSurvey:
    """A board and its installation. An empty text means that there is none.

    `pythons`: series -> program, the preferred first. `clock_s` is its wall clock, seconds since the epoch. `current`
    is the active version; `pending` the one before an unproven switch (`none`: there was none). `started`: what the
    services were last started with. `files`: path -> SHA-256. `foreign`: the prefix has other content. `listening`:
    some program has the agent's port. `models`: packages of `farm model deploy` are there.
    """

    arch: str = ""
    os_name: str = ""
    l4t: str = ""
    glibc: str = ""
    clock_s: float = 0.0
    lacks: tuple[str, ...] = ()
    free_bytes: int = 0
    free_files: int | None = None
    writable: bool = False
    pythons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ours: bool = False
    foreign: bool = False
    current: str = ""
    pending: str | None = None
    started: str = ""
    versions: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    user_exists: bool = False
    agent_pid: int | None = None
    listening: bool = False
    models: bool = False


def fetch_login(shell: BoardShell, system_prefix: str) -> Login:
    """Find out the login's rights, and what is installed at `system_prefix`.

    Raises PermanentError, DeadlineError, BoardLostError.
    """
    script = _prepare("login.sh", prefix=system_prefix, marker=MARKER)
    facts = _read(shell.run(script, SURVEY_TIMEOUT_S, "asking who we are"))
    try:
        return Login(
            int(facts["uid"][0]),
            facts["home"][0],
            "sudo" in facts,
            "systemd" in facts,
            " ".join(facts.get("refused", [""])[0].split())[:_MAX_REFUSAL],
            facts["standing"][0] if "standing" in facts else None,
        )
    except (KeyError, ValueError) as error:
        raise PermanentError(
            f"{shell.connection.address} has no shell that answers", "The login needs a POSIX shell, as sh is."
        ) from error


def fetch_survey(shell: BoardShell, layout: Layout, files: Sequence[str], agent_port: int) -> BoardSurvey:
    """Survey a board; `files` are paths to hash. Changes nothing. Raises as `fetch_login`."""
    newest_first = range(LAST_PYTHON[1], LEAST_PYTHON[1] - 1, -1)
    script = find_agent(layout, agent_port) + _prepare(
        "survey.sh",
        prefix=layout.prefix,
        tools=" ".join((*TOOLS, *(("useradd", "userdel") if layout.as_root else ()))),
        # The system's own Python first: other programs on the board were tested with it.
        pythons=" ".join(("python3", *(f"python3.{minor}" for minor in newest_first))),
        marker=MARKER,
        files=" ".join(files),
        user=layout.user,
        port=f"{agent_port:04X}",
        models=layout.models,
    )
    return parse_survey(shell.run(script, SURVEY_TIMEOUT_S, "looking at what is there"))


def _prepare(name: str, **values: str) -> str:
    """Return a script of this folder with its variables set."""
    script = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return "\n" + join_lines(*(f"{key}={shlex.quote(value)}" for key, value in values.items()), script)


def find_agent(layout: Layout, agent_port: int) -> str:
    """A shell function `agent_listens`: whether the agent has its port; sets `pid` and `failures`.

    Looks for the port's socket among the agent's files, because another program may have the port. The agent's ready
    file comes only once it has found a tracker. The working folder is the prefix.
    """
    if layout.systemd:
        look = (
            f"set -- $(systemctl show -p MainPID -p NRestarts {layout.units[-1]} 2>/dev/null | sort | sed 's/.*=//')\n"
        )
    else:
        pattern = r'.*"agent": {"pid": \([0-9]*\), "restarts": \([0-9]*\).*'
        look = f"set -- $(sed -n 's/{pattern}/\\1 \\2/p' run/state.json 2>/dev/null)\n"
    # In /proc/net/tcp addresses are hexadecimal, byte-swapped on all supported machines.
    address = f"0100007F:{agent_port:04X}"
    return (
        f"agent_listens() {{\n{look}"
        "pid=${1:-}; failures=${2:-0}\n"
        f'inode=$(awk \'$2 == "{address}" && $4 == "0A" {{print $10}}\' /proc/net/tcp)\n'
        '[ -n "$pid" ] && [ -n "$inode" ] && ls -l "/proc/$pid/fd" 2>/dev/null | grep -q "socket:.$inode]"\n}'
    )


def parse_survey(text: str) -> BoardSurvey:
    """Parse the script's output. Raises PermanentError for anything else."""
    facts = _read(text)

    def one(name: str) -> str:
        return facts.get(name, [""])[-1]

    def number(name: str) -> int | None:
        return int(one(name)) if one(name) else None

    try:
        pythons: dict[str, str] = {}
        for line in facts.get("python", []):
            series, _, program = line.partition(" ")
            if LEAST_PYTHON <= tuple(map(int, series.split("."))) <= LAST_PYTHON:
                pythons.setdefault(series, program)
        return BoardSurvey(
            arch=one("arch"),
            os_name=one("os"),
            l4t=parse_release(one("l4t")),
            glibc=one("glibc") if re.fullmatch(r"\d+\.\d+", one("glibc")) else "",
            clock_s=float(one("clock")),
            lacks=tuple(facts.get("lacks", ())),
            free_bytes=1024 * int(one("free_kib")),
            free_files=number("free_files"),
            writable="writable" in facts,
            pythons=pythons,
            ours="ours" in facts,
            foreign="foreign" in facts,
            current=one("current"),
            pending=facts["pending"][-1] if "pending" in facts else None,
            started=one("started"),
            versions=tuple(facts.get("version", ())),
            partial=tuple(facts.get("partial", ())),
            left=tuple(facts.get("left", ())),
            files={path: digest for digest, _, path in (line.partition("  ") for line in facts.get("file", ()))},
            user_exists="user" in facts,
            agent_pid=number("agent_pid"),
            listening="listening" in facts,
            models="models" in facts,
        )
    except ValueError as error:
        raise PermanentError(f"the board's answer cannot be understood: {error}") from error


def _read(text: str) -> dict[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            facts.setdefault(name, []).append(value)
    return facts


def parse_release(text: str) -> str:
    """`36.4.7` from either form; "" for anything else."""
    found = _FILE.match(text) or _PACKAGE.fullmatch(text.strip())
    return "" if found is None else ".".join(part or "0" for part in found.groups())


def describe_release(release: str) -> str:
    """`L4T 36.4.7 (JetPack 6)` for people; "" for none."""
    if not release:
        return ""
    line = _LINES.get(f"R{release.partition('.')[0]}")
    return f"L4T {release}" + (f" ({line[1]})" if line else "")


def find_doubt(release: str, board_type: BoardType | None) -> str:
    """Why a release may not fit a board type; "" if it does, or nothing is known of either."""
    if not release:
        return ""
    major, *rest = (int(part) for part in release.split("."))
    line, about = _LINES.get(f"R{major}"), describe_release(release)
    check = "it is used all the same; `farm doctor --hardware` says what it changed"
    if line is None:
        return f"{about} is of a line that is not known here: {check}"
    newest, _, chips = line
    if board_type is not None and board_type.soc and board_type.soc not in chips:
        return f"{about} is not known to be for a {board_type.name}: {check}"
    if tuple(rest[:2]) > newest:
        return f"{about} is newer than {major}.{newest[0]}.{newest[1]}, the newest known here: {check}"
    if board_type is not None and board_type.releases and f"R{major}" not in board_type.releases:
        known = ", ".join(board_type.releases)
        return f"clocks and sensors of a {board_type.name} are known of {known}, not of {about}: {check}"
    return ""
