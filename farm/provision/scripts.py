"""The shell scripts that change a board; each may be interrupted anywhere and run again. Text only.

Versions are side by side and valid only with their stamp `complete`, files are replaced by renaming, and `pending`
records the previous version before the first change that affects the running agent. Files of an installation beside
`Layout`'s: `tvm-farm-board` marks the folder as the farm's, `made-folders` and `made-user` list what was created
outside it, `started` identifies what the services were last started with.
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
# Everything that starts on a board: agent, clock helper, metrics, commands.
_LOADED = tuple(
    f"device_agent.{name}"
    for name in (
        "agent", "clocks.helper", "commands", "doctor", "metrics", "listener.rpc", "session.session", "worker.worker",
    )
)  # fmt: skip
# Stop waiting for an agent after three failed starts.
_FAILED_STARTS = 3
# The device node of a Jetson's GPU memory, which its driver needs. On JetPack its group is `video`.
GPU_NODE = "/dev/nvmap"
_PAUSE = "sleep 0.1 2>/dev/null || sleep 1"


def make_folder(layout: Layout) -> str:
    """Create the prefix, and record which folders were created."""
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
    """Create the folder for uploads, owned by the login also under sudo."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "rm -rf incoming; mkdir -m 700 incoming",
        'chown "${SUDO_UID:-$(id -u)}" incoming',
    )


def unpack(layout: Layout) -> str:
    """Unpack the upload and remove the tar file."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "mkdir -p incoming/files incoming/tmp",
        f"tar -xf {BUNDLE} --no-same-owner -C incoming/files; rm -f {BUNDLE}",
        "gzip -dc incoming/files/uv/uv.gz >incoming/uv; chmod 700 incoming/uv",
        "rm incoming/files/uv/uv.gz",
    )


def install_python(layout: Layout, manifest: BundleManifest) -> str:
    """Install the included interpreter with uv; prints `already` if it is there."""
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
    """Create the version's folder: a virtual environment with the pinned wheels, stamped once complete."""
    folder = shlex.quote(layout.version(manifest.key))
    python = plan.python or layout.below(f"python/{manifest.managed_python}/bin/python3")
    # As the folder's owner, so that the agent's bytecode is cached, which its user could not write. Compiling all of
    # TVM's 2,000 modules would take a slow board a minute.
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
        # The stamp must not reach the disk before the files, in case of a power cut.
        f"sync; date >{folder}/complete",
        f"rm -rf {shlex.quote(layout.below('incoming'))}",
    )


def make_user(layout: Layout) -> str:
    """Create an account without home, password or shell; record it first, so that an interruption leaves no trace."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        f"if id {layout.user} >/dev/null 2>&1; then exit 0; fi",
        "touch made-user",
        "useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "
        f"--comment 'TVM tuning farm' {layout.user}",
    )


def write_files(layout: Layout, files: Sequence[BoardFile]) -> str:
    """Replace these files, each atomically, and keep the old ones in `previous`."""
    lines = [_note_pending(layout), "mkdir -p previous"]
    for file in files:
        path, name = shlex.quote(file.path), shlex.quote(file.path.replace("/", "%"))
        part = shlex.quote(f"{file.path}.part")
        # Files kept by an interrupted run are the originals.
        lines.append(
            f"if [ ! -e previous/{name} ] && [ ! -e previous/{name}.absent ]; then "
            f"if [ -e {path} ]; then cp -p {path} previous/.part; mv previous/.part previous/{name}; "
            f"else touch previous/{name}.absent; fi; fi"
        )
        lines.append(f"printf %s {shlex.quote(file.text)} >{part}; chmod {file.mode:o} {part}; mv -f {part} {path}")
    return join_lines(*lines)


def switch(layout: Layout, key: str) -> str:
    """Point `current` to a version, atomically."""
    version = f"versions/{shlex.quote(key)}"
    return join_lines(_note_pending(layout), f"ln -sfn {version} current.part; mv -fT current.part current")


def _let_use_gpu(layout: Layout) -> str:
    """Give the created account access to a GPU, through the group of the driver's device node."""
    return (
        f"if [ -e made-user ] && [ -e {GPU_NODE} ]; then group=$(stat -c %G {GPU_NODE}); "
        f'case "$group" in root|UNKNOWN) ;; *) usermod -a -G "$group" {layout.user} ;; esac; fi'
    )


def start(layout: Layout, stamp: str, agent_port: int, timeout_s: float) -> str:
    """Restart the services, and wait until the agent is ready."""
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "if [ -f started ]; then mv -f started started.before; fi",
        *([_let_use_gpu(layout)] if layout.as_root else []),
        _restart(layout, agent_port, timeout_s),
        f"printf %s {shlex.quote(stamp)} >started",
    )


def roll_back(layout: Layout, key: str, agent_port: int, timeout_s: float) -> str:
    """Restore the state before an unproven change, start it, and remove the version `key`.

    Prints `back VERSION`, or `none` without an earlier one.
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
        # Not restarted if nothing has been stopped yet.
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
    """Clean up after a proven change; keeps the previous version."""
    folders = " ".join(shlex.quote(f"versions/{name}") for name in removals)
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "rm -f pending started.before; rm -rf previous incoming",
        f"rm -rf {folders}" if folders else ":",
        # An interpreter of the farm's that no version uses any more.
        "for python in python/cpython-*.*.*; do",
        '  if [ -d "$python" ] && ! grep -qsF "/$python/" versions/*/pyvenv.cfg; then rm -rf "$python"; fi; done',
        "sync",
    )


def clean_up(layout: Layout, key: str) -> str:
    """Clean up after a failed step: remove uploads, and an incomplete version."""
    folder = shlex.quote(layout.version(key))
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "rm -rf incoming",
        f"if [ ! -f {folder}/complete ]; then rm -rf {folder}; fi",
    )


def uninstall(layout: Layout, files: Sequence[BoardFile]) -> str:
    """Remove everything, the marker last, so that an interrupted run can be completed. Prints what was removed."""
    lines = [
        f"prefix={shlex.quote(layout.prefix)}",
        f'if [ ! -f "$prefix/{MARKER}" ]; then echo nothing; exit 0; fi',
        'cd "$prefix"',
    ]
    if layout.systemd:
        lines.append(f"systemctl disable -q --now {' '.join(reversed(layout.units))} 2>/dev/null || true")
    else:
        # Any complete version can stop the supervisor; `current` may be missing.
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
        # The marker and the list go last, so that the rest of an interrupted removal is still known as the farm's.
        f"find . -mindepth 1 -maxdepth 1 ! -name {MARKER} ! -name made-folders ! -name .lock -exec rm -rf {{}} +",
        f'cd /; rm -f "$prefix/made-folders" "$prefix/.lock" "$prefix/{MARKER}"',
        # Deepest first; a folder in other use stays.
        'for folder in $made; do rmdir "$folder" 2>/dev/null || true; done',
        "echo removed",
    ]
    return join_lines(*lines)


def _uv_environment() -> str:
    """Keep uv's files on the installation's disk: /tmp may be small, and hard links need one disk."""
    return (
        'UV_CACHE_DIR="$PWD/incoming/cache"; TMPDIR="$PWD/incoming/tmp"; export UV_CACHE_DIR TMPDIR; mkdir -p "$TMPDIR"'
    )


def _note_pending(layout: Layout) -> str:
    return join_lines(
        f"cd {shlex.quote(layout.prefix)}",
        "if [ ! -f pending ]; then before=$(readlink current || true); before=${before#versions/}",
        '  echo "${before:-none}" >pending.part; mv pending.part pending; fi',
    )


def _restart(layout: Layout, agent_port: int, timeout_s: float) -> str:
    if layout.systemd:
        units = " ".join(layout.units)
        begin = f"systemctl daemon-reload\nsystemctl enable -q {units}\nsystemctl restart {units}"
        gone = "false"
        log = f"journalctl -q --no-pager -o cat -n 4 -u {layout.units[-1]}"
    else:
        program = shlex.quote(layout.program)
        begin = f"{program} stop >/dev/null\n{program} start >/dev/null"
        # The lock is free: the supervisor itself has ended.
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
