"""Where a board keeps the logs of its agent and clock helper, and the shell command that shows their ends.

Pure text; `farm/connectivity/ssh.py` runs it. POSIX shell only.
"""

from __future__ import annotations

import shlex

AGENT_UNIT, HELPER_UNIT = "tvm-farm-agent", "tvm-farm-clock-helper"
# Prefixes of provisioned boards, as root and as an ordinary user; the second is below the login's home.
PREFIXES = ("/opt/tvm-farm", "$HOME/.local/share/tvm-farm-board")
# Below a prefix, on boards without systemd.
LOG_FILES = ("log/agent.log", "log/clock-helper.log")
# For more lines, fetch the whole file.
MAX_LINES = 100_000

_JOURNAL = (
    # Without sudo an ordinary user cannot read the services' logs, and gets no message.
    's=; [ "$(id -u)" = 0 ] || {{ sudo -n true 2>/dev/null && s="sudo -n"; }}; '
    "$s journalctl --no-pager --quiet --output=short-iso --lines={lines} --unit={agent} --unit={helper}"
)
_FILES = (
    "found=; for file in {files}; do "
    'if [ -r "$file" ]; then found=1; echo "==> $file <=="; tail -n {lines} "$file"; fi; done; '
    '[ -n "$found" ] || {{ echo "no logs of an agent: neither systemd nor one of" {files} >&2; exit 3; }}'
)
_TAIL = (
    'set --; for file in {files}; do if [ -r "$file" ]; then set -- "$@" "$file"; fi; done; '
    '[ $# -gt 0 ] || {{ echo "no logs of an agent: neither systemd nor one of" {files} >&2; exit 3; }}; '
    # By name: the supervisor rotates logs.
    's=; tail -n {lines} -F "$@" 2>/dev/null'
)
# sshd closes a command's standard input once its client is gone; a following command would otherwise never end.
_WHILE_HEARD = "{command} & cat >/dev/null; $s kill $! 2>/dev/null; wait"


def plan_log_command(lines: int, prefix: str = "") -> str:
    """A command that prints the last `lines` lines of both logs; exit code 3 if a board has neither.

    Reads systemd's journal if the agent is a unit, else the supervisor's files under `prefix` (empty: the provisioned
    places).
    """
    return _choose(_JOURNAL, _FILES, lines, prefix)


def plan_follow_command(lines: int, prefix: str = "") -> str:
    """As `plan_log_command`, and then new lines until the command's standard input ends."""
    journal = _JOURNAL.replace("--no-pager", "--no-pager --follow")
    return _choose(_WHILE_HEARD.replace("{command}", journal), _WHILE_HEARD.replace("{command}", _TAIL), lines, prefix)


def _choose(journal: str, files: str, lines: int, prefix: str) -> str:
    roots = [shlex.quote(prefix.rstrip("/") or "/")] if prefix else [f'"{root}"' for root in PREFIXES]
    paths = " ".join(f"{root}/{name}" for root in roots for name in LOG_FILES)
    about = {"lines": lines, "agent": AGENT_UNIT, "helper": HELPER_UNIT, "files": paths}
    return f"if {plan_unit_test()}; then {journal.format(**about)}; else {files.format(**about)}; fi"


def plan_unit_test() -> str:
    """A shell condition: systemd runs, and the agent is a unit."""
    return f"[ -d /run/systemd/system ] && systemctl cat {AGENT_UNIT} >/dev/null 2>&1"
