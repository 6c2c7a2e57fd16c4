"""The shell scripts that change a board, each a whole that may be cut off anywhere and run again. Text only.

What makes that true: versions lie side by side and count only with their stamp `complete`, files are replaced by
renaming, and before the first change that the running agent could notice the version before is noted in `pending`.
Files of an installation, beside what `Layout` names: `tvm-farm-board` says that the folder is ours, `made-folders` and
`made-user` what we made outside of it, `started` with what the services were last started.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from farm.provision.bundle import MANIFEST, BundleManifest
from farm.provision.interpreters import FOLDER_MARK
from farm.provision.layout import BoardFile, Layout
from farm.provision.plan import ProvisioningPlan
from farm.provision.shell import join_lines
from farm.provision.survey import MARKER, find_agent

BUNDLE = "incoming/bundle.tar"
# Everything that starts on a board: its agent and clock helper, their metrics, the commands for people.
_LOADED = tuple(
    f"device_agent.{name}"
    for name in (
        "agent",
        "clocks.helper",
        "commands",
        "doctor",
        "metrics",
        "listener.rpc",
        "session.session",
        "worker.worker",
    )
)
# Ends the wait for an agent that is started again and again: three failed starts are no coincidence.
_FAILED_STARTS = 3
# Memory of a Jetson's GPU: what its driver cannot do without. On JetPack it is of the group `video`.
GPU_NODE = "/dev/nvmap"
_PAUSE = "sleep 0.1 2>/dev/null || sleep 1"


def make_folder(layout: Layout) -> str:
    """Make the prefix, and note which folders that took."""
    return join_lines(
        f"prefix={shlex.quote(layout.prefix)}",
        'made=""; folder=$prefix',
        'while [ ! -d "$folder" ]; do made="$made$folder\n"; folder=${folder%/*}; folder=${folder:-/}; done',
        'mkdir -p "$prefix"; cd "$prefix"',
        'if [ ! -e made-folders ]; then printf %s "$made" >made-folders; fi',
        f"echo 'The agent of the TVM tuning farm; farm board provision --uninstall removes it.' >{MARKER}",
        "mkdir -p versions etc bin",
    )


def make_incoming(layout: Layout) -> str:
    """The folder that files are sent to; the login's own where we are root by sudo."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "rm -rf incoming; mkdir -m 700 incoming",
        'chown "${SUDO_UID:-$(id -u)}" incoming',
    )


def unpack(layout: Layout) -> str:
    """Unpack what was sent, and drop the tar file."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "mkdir -p incoming/files incoming/tmp",
        f"tar -xf {BUNDLE} --no-same-owner -C incoming/files; rm -f {BUNDLE}",
        "gzip -dc incoming/files/uv/uv.gz >incoming/uv; chmod 700 incoming/uv",
        "rm incoming/files/uv/uv.gz",
    )


def install_python(layout: Layout, manifest: BundleManifest) -> str:
    """Have uv unpack the interpreter that came along; prints `already` where it is there."""
    program = shlex.quote(layout.below(f"python/{manifest.managed_python}/bin/python3"))
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        f"if {program} -I -c 'import ssl, ctypes' 2>/dev/null; then echo already; exit 0; fi",
        'place="$PWD/incoming/files/python"',
        f'sed "s,{FOLDER_MARK},$place," "$place/downloads.json" >"$place/here.json"',
        _uv_environment(),
        f'UV_PYTHON_DOWNLOADS_JSON_URL="file://$place/here.json" incoming/uv python install --no-config --no-bin '
        f'--install-dir "$PWD/python" {shlex.quote(manifest.managed_python)}',
        "chmod -R a+rX python",
        f"{program} -I -c 'import ssl, ctypes'",
    )


def install_version(layout: Layout, manifest: BundleManifest, plan: ProvisioningPlan) -> str:
    """Make the version's folder: a virtual environment with the pinned wheels, stamped when it is whole."""
    folder = shlex.quote(layout.version(manifest.key))
    python = plan.python or layout.below(f"python/{manifest.managed_python}/bin/python3")
    # As the owner of the folder, so this also leaves the bytecode of what an agent loads, which the agent's user could
    # not write. Compiling all of TVM's 2,000 modules would take a slow board a minute.
    check = f"import {', '.join(_LOADED)}, tvm.rpc, numpy"
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        f"rm -rf {folder}",
        _uv_environment(),
        "incoming/uv venv --no-config --offline --no-project --no-python-downloads "
        f"--python {shlex.quote(python)} {folder}",
        f"incoming/uv pip install --no-config --offline --no-index --find-links incoming/files/wheels --no-deps "
        f"--require-hashes --python {folder}/bin/python "
        f"-r incoming/files/requirements-{plan.series}.txt",
        f"cp incoming/files/supervisor.py incoming/files/{MANIFEST} {folder}/",
        f"chmod -R a+rX {folder}",
        f"cd /; TVM_USE_RUNTIME_LIB=1 {folder}/bin/python -I -c '{check}'",
        # A stamp that reaches the disk before the files would survive a power cut that they do not.
        f"sync; date >{folder}/complete",
        f"rm -rf {shlex.quote(layout.below('incoming'))}",
    )


def make_user(layout: Layout) -> str:
    """An account without a home, a password or a shell. Noted first: a cut must not leave one that nobody removes."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        f"if id {layout.user} >/dev/null 2>&1; then exit 0; fi",
        "touch made-user",
        "useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "
        f"--comment 'TVM tuning farm' {layout.user}",
    )


def write_files(layout: Layout, files: Sequence[BoardFile]) -> str:
    """Replace those files, each in one step, and keep what they were in `previous`."""
    lines = [_note_pending(layout), "mkdir -p previous"]
    for file in files:
        path, name = shlex.quote(file.path), shlex.quote(file.path.replace("/", "%"))
        part = shlex.quote(f"{file.path}.part")
        # What a cut run has kept already is what was there before it.
        lines.append(
            f"if [ ! -e previous/{name} ] && [ ! -e previous/{name}.absent ]; then "
            f"if [ -e {path} ]; then cp -p {path} previous/.part; mv previous/.part previous/{name}; "
            f"else touch previous/{name}.absent; fi; fi"
        )
        lines.append(f"printf %s {shlex.quote(file.text)} >{part}; chmod {file.mode:o} {part}; mv -f {part} {path}")
    return join_lines(*lines)


def switch(layout: Layout, key: str) -> str:
    """Point `current` to a version, in one step."""
    return join_lines(_note_pending(layout), _link(key))


def _let_use_gpu(layout: Layout) -> str:
    """Let the account that we made use the GPU, where a board has one: by the group of the driver's device node."""
    return (
        f"if [ -e made-user ] && [ -e {GPU_NODE} ]; then group=$(stat -c %G {GPU_NODE}); "
        f'case "$group" in root|UNKNOWN) ;; *) usermod -a -G "$group" {layout.user} ;; esac; fi'
    )


def start(layout: Layout, stamp: str, agent_port: int, timeout_s: float) -> str:
    """Start the services anew with what is there now, and wait until the agent says that it is ready."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "if [ -f started ]; then mv -f started started.before; fi",
        *([_let_use_gpu(layout)] if layout.as_root else []),
        _restart(layout, agent_port, timeout_s),
        f"printf %s {shlex.quote(stamp)} >started",
    )


def roll_back(layout: Layout, key: str, agent_port: int, timeout_s: float) -> str:
    """Put back what was there before the change that is not proven, start it, and remove the version `key`.

    Prints `back VERSION`, or `none` where there was nothing before.
    """
    stop = f"current/bin/python -I current/supervisor.py --prefix {shlex.quote(layout.prefix)} stop || true"
    if layout.systemd:
        stop = f"systemctl stop {' '.join(reversed(layout.units))} || true"
        off, reload = f"systemctl disable -q {' '.join(layout.units)} 2>/dev/null || true", "systemctl daemon-reload"
    else:
        off = reload = ":"
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "if [ ! -f pending ]; then echo nothing; exit 0; fi",
        "before=$(cat pending)",
        # Not restarted where nothing has been stopped yet.
        'running=""; if [ -f started ] && [ "$(readlink current)" = "versions/$before" ]; then running=1; fi',
        f'if [ -z "$running" ]; then {stop}; fi',
        f'if [ ! -f "versions/$before/complete" ]; then before=none; {off}; fi',
        'for kept in previous/*; do name=${kept#previous/}; path=$(echo "${name%.absent}" | sed "s,%,/,g")',
        '  case $name in "*") ;; *.absent) rm -f "$path";;',
        '    *) cp -p "$kept" "$path.part"; mv -f "$path.part" "$path";; esac; done',
        f'if [ "$before" = none ]; then rm -f current started; {reload}; else',
        '  ln -sfn "versions/$before" current.part; mv -fT current.part current',
        f'  if [ -z "$running" ]; then\n{_restart(layout, agent_port, timeout_s)}  fi',
        "fi",
        'if [ "$before" != none ] && [ -z "$running" ] && [ -f started.before ]; then mv -f started.before started; fi',
        "rm -rf previous incoming pending started.before",
        f'if [ "$before" != {shlex.quote(key)} ]; then rm -rf versions/{shlex.quote(key)}; fi',
        'echo "back $before"',
    )


def finish(layout: Layout, removals: Sequence[str]) -> str:
    """What was new is proven: forget what it replaced, but for the version before."""
    folders = " ".join(shlex.quote(f"versions/{name}") for name in removals)
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "rm -f pending started.before; rm -rf previous incoming",
        f"rm -rf {folders}" if folders else ":",
        # An interpreter of ours that no version uses any more.
        "for python in python/cpython-*.*.*; do",
        '  if [ -d "$python" ] && ! grep -qsF "/$python/" versions/*/pyvenv.cfg; then rm -rf "$python"; fi; done',
        "sync",
    )


def clean_up(layout: Layout, key: str) -> str:
    """After a failed step: remove what was sent, and a version that did not become whole."""
    folder = shlex.quote(layout.version(key))
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "rm -rf incoming",
        f"if [ ! -f {folder}/complete ]; then rm -rf {folder}; fi",
    )


def uninstall(layout: Layout, files: Sequence[BoardFile]) -> str:
    """Remove everything, the marker last: a run that was cut off is completed by the next. Prints what was removed."""
    lines = [
        f"prefix={shlex.quote(layout.prefix)}",
        f'if [ ! -f "$prefix/{MARKER}" ]; then echo nothing; exit 0; fi',
        'cd "$prefix"',
    ]
    if layout.systemd:
        lines.append(f"systemctl disable -q --now {' '.join(reversed(layout.units))} 2>/dev/null || true")
    else:
        # Any whole version can end the supervisor; `current` may be gone.
        lines.append(
            "for version in current versions/*; do if [ -f $version/complete ]; then "
            f"$version/bin/python -I $version/supervisor.py --prefix {shlex.quote(layout.prefix)} stop; break; fi; done"
        )
    outside = [file.path for file in files if not file.path.startswith(layout.prefix + "/")]
    lines += [f"rm -f {shlex.quote(path)} {shlex.quote(path)}.part" for path in outside]
    if layout.systemd:
        lines.append(f"systemctl daemon-reload; systemctl reset-failed {' '.join(layout.units)} 2>/dev/null || true")
    lines += [f"rm -rf {shlex.quote(folder)}" for folder in layout.outside]
    if layout.user:
        # Processes of the account may still be ending.
        lines.append(
            f"if [ -e made-user ] && id {layout.user} >/dev/null 2>&1; then tries=50; "
            f"until userdel {layout.user} 2>error; do tries=$((tries - 1)); "
            f'if [ "$tries" = 0 ]; then cat error >&2; exit 1; fi; {_PAUSE}; done; fi'
        )
    lines += [
        "made=$(cat made-folders 2>/dev/null || true)",
        # The marker and the list go last, so that what is left of a cut removal is still known to be ours.
        f"find . -mindepth 1 -maxdepth 1 ! -name {MARKER} ! -name made-folders ! -name .lock -exec rm -rf {{}} +",
        f'cd /; rm -f "$prefix/made-folders" "$prefix/.lock" "$prefix/{MARKER}"',
        # Deepest first; one that somebody else uses by now stays.
        'for folder in $made; do rmdir "$folder" 2>/dev/null || true; done',
        "echo removed",
    ]
    return join_lines(*lines)


def _uv_environment() -> str:
    """Have uv keep everything on the installation's disk: /tmp may be small, and links work only within one disk."""
    return (
        'UV_CACHE_DIR="$PWD/incoming/cache"; TMPDIR="$PWD/incoming/tmp"; export UV_CACHE_DIR TMPDIR; mkdir -p "$TMPDIR"'
    )


def _note_pending(layout: Layout) -> str:
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "if [ ! -f pending ]; then before=$(readlink current || true); before=${before#versions/}",
        '  echo "${before:-none}" >pending.part; mv pending.part pending; fi',
    )


def _link(key: str) -> str:
    return f"ln -sfn versions/{shlex.quote(key)} current.part; mv -fT current.part current"


def _restart(layout: Layout, agent_port: int, timeout_s: float) -> str:
    if layout.systemd:
        units = " ".join(layout.units)
        begin = f"systemctl daemon-reload\nsystemctl enable -q {units}\nsystemctl restart {units}"
        gone = "false"
        log = f"journalctl -q --no-pager -o cat -n 4 -u {layout.units[-1]}"
    else:
        program = shlex.quote(layout.program)
        begin = f"{program} stop >/dev/null\n{program} start >/dev/null"
        # Nobody holds the lock: the supervisor itself has ended.
        gone = "flock -n run/supervisor.pid true"
        log = "tail -q -n 4 log/supervisor.log log/agent.log"
    return join_lines(
        find_agent(layout, agent_port),
        begin,
        f"tries={int(timeout_s * 10)}",
        "until agent_listens; do",
        "  tries=$((tries - 1))",
        f'  if [ "$tries" -le 0 ] || [ "$failures" -ge {_FAILED_STARTS} ] || {gone}; then',
        f"    echo 'the agent does not start:' >&2; {log} >&2 || true; exit 1; fi",
        f"  {_PAUSE}",
        "done",
    )
