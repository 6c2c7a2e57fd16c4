"""Provision one board over SSH: survey, plan, install, prove, or roll back.

One class: each step records the state that a failed later step reports or restores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_files import put
from farm.connectivity.ssh_handshake import SshAddress
from farm.errors import FarmError, PermanentError
from farm.inventory.board_types import load_board_types
from farm.provision import scripts
from farm.provision.bundle import Bundle
from farm.provision.bundle_build import BundleCache
from farm.provision.layout import (
    ROOT_PREFIX,
    AgentOptions,
    BoardFile,
    Layout,
    compute_digest,
    plan_layout,
    render_files,
)
from farm.provision.plan import (
    BoardReport,
    ProvisioningOutcome,
    ProvisioningPlan,
    StepReport,
    StepStatus,
    check_board,
    plan_removals,
    plan_steps,
)
from farm.provision.shell import BoardShell
from farm.provision.steps import Interrupted, StepRunner
from farm.provision.survey import BoardSurvey, Login, describe_release, fetch_login, fetch_survey

# Step deadlines for a slow board with a slow SD card: an unpacked bundle is 150 MB in 3,000 files.
QUICK_S = 60.0
# 42 MB over a bad Wi-Fi.
SEND_S = 600.0
UNPACK_S = 180.0
PYTHON_S = 300.0
INSTALL_S = 900.0
# Importing TVM and reading the sensors took 9 s under emulation, and 76 s with a third of a core.
START_S = 180.0
REMOVE_S = 120.0
_RECONNECTS = 3

# Reserves a board while its agent restarts; raises FarmError if it is in use.
Hold = Callable[[str], AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True)
class ProvisioningTarget:
    """A board to provision: its name, its sshd, and its agent's options."""

    name: str
    address: SshAddress
    options: AgentOptions

    @property
    def key(self) -> str:
        """Its key at the tracker."""
        return f"{self.options.board_type}/{self.name}"


# Proves a board end to end and returns a line on it; raises FarmError if it fails.
Probe = Callable[[ProvisioningTarget], str]


@dataclasses.dataclass(frozen=True)
class ProvisioningJob:
    """The request for every board of one call. `show` gets each finished step, from any thread."""

    bundles: BundleCache
    probe: Probe
    known_hosts: KnownHosts | None = None
    prefix: str = ""
    dry_run: bool = False
    uninstall: bool = False
    hold: Hold = lambda name: contextlib.nullcontext()
    show: Callable[[str, StepReport], None] = lambda name, report: None
    start_timeout_s: float = START_S


class Provisioner(StepRunner):
    """The work on one board. Call `run` once; `interrupt` is for other threads."""

    def __init__(self, target: ProvisioningTarget, job: ProvisioningJob) -> None:
        super().__init__(lambda report: job.show(target.name, report))
        self.target = target
        self._job = job
        self._port = target.options.agent_port
        self._notes: list[str] = []
        self._connection: SshConnection | None = None
        self._as_root = self._sudo = False
        self._version = ""
        self._state = "nothing was done to it"

    def run(self) -> BoardReport:
        """Run it; the report contains every failure."""
        try:
            outcome = self._uninstall() if self._job.uninstall else self._provision()
        except Interrupted:
            outcome = ProvisioningOutcome.INTERRUPTED
        except FarmError:  # the failed step is already reported
            outcome = ProvisioningOutcome.INTERRUPTED if self._stop.is_set() else ProvisioningOutcome.FAILED
        finally:
            if self._connection is not None:
                self._connection.close()
        return BoardReport(
            self.target.name, outcome, self._version, self._state, tuple(self._steps), tuple(self._notes)
        )

    def interrupt(self) -> None:
        """End the work soon: a step that waits for the board ends with its connection."""
        self._stop.set()
        if self._connection is not None:
            self._connection.close("interrupted")

    def _provision(self) -> ProvisioningOutcome:
        shell, layout = self._connect()
        files = render_files(layout, self.target.options)
        survey = self._check(shell, layout, files)
        bundle, plan = self._step("bundle", lambda: self._find_bundle(survey, layout, files))
        if bundle is None or self._job.dry_run:
            for name in ("folder", "send", "python", "install", "user", "services", "switch", "start", "finish"):
                self._note_step(name, StepStatus.WOULD if name in plan.needed else StepStatus.ALREADY, "")
            return ProvisioningOutcome.PLANNED
        key = bundle.manifest.key
        try:
            self._install(shell, layout, bundle, plan)
        except (FarmError, Interrupted):
            self._clean_up(layout, key)
            raise
        busy = ""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._job.hold(self.target.name))
            except FarmError as error:
                if plan.disturbs:
                    self._note_step("hold", StepStatus.FAILED, str(error))
                    raise
                busy = error.message
            if not self._activate(shell, layout, plan, key, files):
                return ProvisioningOutcome.ROLLED_BACK
            return self._prove(shell, layout, plan, survey, key, busy)

    def _connect(self) -> tuple[BoardShell, Layout]:
        def work() -> tuple[tuple[BoardShell, Layout], StepStatus, str]:
            self._connection = SshConnection.connect(self.target.address, self._job.known_hosts)
            if self._stop.is_set():
                raise Interrupted
            login = fetch_login(BoardShell(self._connection), ROOT_PREFIX)
            self._note_login(login)
            self._as_root, self._sudo = login.uid == 0 or login.may_sudo, login.uid != 0 and login.may_sudo
            layout = plan_layout(self._job.prefix, login.uid, login.may_sudo, login.systemd, login.home)
            who = f"{self.target.address.user}{' with sudo' if self._sudo else ''}"
            where = f"{who} at {self.target.address}, {layout.prefix}"
            return (self._shell(), layout), StepStatus.OK, where

        return self._timed("connect", work)

    def _note_login(self, login: Login) -> None:
        """Report why sudo is unavailable. Raises PermanentError if the installation belongs to root."""
        if login.uid == 0 or login.may_sudo:
            return
        if login.standing is not None and not self._job.prefix:
            version = login.standing or "an unfinished version"
            self._state = f"as before: {version} in {ROOT_PREFIX}"
            raise PermanentError(
                f"{version} is installed for the whole system in {ROOT_PREFIX}, and changing that takes sudo without a "
                f"password, which {self.target.address.user} does not have: {login.refused}",
                "Let the login use sudo without a password again, or log in as root. A second installation beside it "
                "takes --prefix, and a port of its own.",
            )
        self._notes.append(f"sudo: {login.refused}")

    def _check(self, shell: BoardShell, layout: Layout, files: Sequence[BoardFile]) -> BoardSurvey:
        def work() -> tuple[BoardSurvey, StepStatus, str]:
            survey = fetch_survey(shell, layout, [file.path for file in files], self._port)
            self._version = survey.current
            self._state = f"as before: {survey.current or 'no agent of ours'}"
            kind = load_board_types().get(self.target.options.board_type)
            self._notes += check_board(survey, layout, time.time(), kind)
            python = next(iter(survey.pythons), "older than 3.10")
            system = ", ".join(filter(None, (survey.os_name, describe_release(survey.l4t))))
            facts = f"{system}, {survey.arch}, glibc {survey.glibc}, Python {python}"
            notes = "".join(f"; {note}" for note in self._notes)
            return survey, StepStatus.OK, f"{facts}, {survey.free_bytes / 1e9:.1f} GB free{notes}"

        return self._timed("check", work)

    def _find_bundle(
        self, survey: BoardSurvey, layout: Layout, files: tuple[BoardFile, ...]
    ) -> tuple[tuple[Bundle | None, ProvisioningPlan], StepStatus, str]:
        """The bundle, and the remaining steps. A dry run builds none, which would fetch its parts."""
        look = self._job.bundles.find if self._job.dry_run else self._job.bundles.require
        bundle = look(survey.arch, tuple(survey.pythons))
        plan = plan_steps(survey, layout, bundle, files)
        if bundle is None:
            return (None, plan), StepStatus.WOULD, "make one of about 45 MB, or 75 MB with a Python"
        return (bundle, plan), StepStatus.OK, f"{bundle.manifest.key}, {bundle.size / 1e6:.0f} MB"

    def _install(self, shell: BoardShell, layout: Layout, bundle: Bundle, plan: ProvisioningPlan) -> None:
        """The steps that do not affect the running agent."""
        manifest = bundle.manifest

        def send() -> str:
            shell.change(layout, scripts.make_incoming(layout), QUICK_S, "making a folder for the bundle")
            moved = put(shell.connection, bundle.path, layout.below(scripts.BUNDLE), 0o600, SEND_S)
            shell.change(layout, scripts.unpack(layout), UNPACK_S, "unpacking the bundle")
            return f"{moved.size / 1e6:.0f} MB in {moved.seconds:.1f} s"

        def python() -> str:
            shell.change(layout, scripts.install_python(layout, manifest), PYTHON_S, "unpacking a Python")
            return manifest.managed_python

        def install() -> str:
            shell.change(layout, scripts.install_version(layout, manifest, plan), INSTALL_S, "installing the agent")
            return layout.version(manifest.key)

        def user() -> str:
            shell.change(layout, scripts.make_user(layout), QUICK_S, f"making the user {layout.user}")
            return layout.user

        def folder() -> str:
            shell.run(scripts.make_folder(layout), QUICK_S, f"making {layout.prefix}")
            return layout.prefix

        self._change(plan, "folder", folder)
        self._change(plan, "send", send)
        self._change(plan, "python", python)
        self._change(plan, "install", install)
        self._change(plan, "user", user)

    def _activate(
        self, shell: BoardShell, layout: Layout, plan: ProvisioningPlan, key: str, files: tuple[BoardFile, ...]
    ) -> bool:
        """The steps that affect the running agent. False if they failed and the previous state is restored."""
        stamp = f"{key} {compute_digest(files)}"

        def services() -> str:
            shell.change(layout, scripts.write_files(layout, files), QUICK_S, "writing the services")
            return ", ".join(layout.units) or "its own supervisor"

        def switch() -> str:
            shell.change(layout, scripts.switch(layout, key), QUICK_S, "switching")
            return f"from {self._version or 'nothing'} to {key}"

        def start() -> str:
            timeout_s = self._job.start_timeout_s
            shell.change(
                layout, scripts.start(layout, stamp, self._port, timeout_s), timeout_s + QUICK_S, "starting the agent"
            )
            return f"listens on the board's loopback, port {self._port}"

        try:
            if plan.disturbs:
                self._state = f"between {self._version or 'nothing'} and {key}; run the command again"
            self._change(plan, "services", services)
            self._change(plan, "switch", switch)
            self._change(plan, "start", start)
        except (FarmError, Interrupted) as error:
            if self._roll_back(layout, key, error):
                return False
            raise
        return True

    def _prove(
        self, shell: BoardShell, layout: Layout, plan: ProvisioningPlan, survey: BoardSurvey, key: str, busy: str
    ) -> ProvisioningOutcome:
        """Run a proof on the board, then remove what it replaced. `busy` names a user, who must not be disturbed."""
        changing = bool(plan.needed)
        if changing:
            self._state = f"{key} runs and is not proven yet; run the command again"
        try:
            self._step(
                "probe", lambda: (None, StepStatus.OK, f"left out: {busy}" if busy else self._job.probe(self.target))
            )
        except (FarmError, Interrupted) as error:
            changed = {"services", "switch"} & plan.needed or survey.pending is not None
            if changed and self._roll_back(layout, key, error):
                return ProvisioningOutcome.ROLLED_BACK
            raise
        self._version = key

        def finish() -> str:
            removals = plan_removals(survey, key)
            shell.change(layout, scripts.finish(layout, removals), QUICK_S, "removing what is not needed any more")
            return f"removed {', '.join(removals)}" if removals else ""

        self._change(plan, "finish", finish)
        self._state = f"{key} runs and is proven"
        return ProvisioningOutcome.PROVISIONED if changing else ProvisioningOutcome.UNCHANGED

    def _roll_back(self, layout: Layout, key: str, error: BaseException) -> bool:
        """Restore the previous state; False if the board is unreachable or there was none."""
        if isinstance(error, Interrupted) or self._stop.is_set():
            return False

        def work() -> tuple[StepStatus, str]:
            timeout_s = self._job.start_timeout_s
            script = scripts.roll_back(layout, key, self._port, timeout_s)
            said = self._reconnected().change(layout, script, timeout_s + QUICK_S, "putting back what was there before")
            before = said.split()[-1] if said.split() else "nothing"
            if before == "nothing":  # it was not touched yet
                self._state = f"as before: {self._version or 'no agent of ours'}"
                return StepStatus.ALREADY, self._state
            self._version = "" if before == "none" else before
            self._state = f"{before} runs again" if self._version else f"no agent of {layout.prefix} runs, as before"
            return StepStatus.DONE, self._state

        with contextlib.suppress(FarmError):
            self._step("roll back", lambda: (None, *work()))
            return bool(self._version) and self._steps[-1].status is StepStatus.DONE
        return False

    def _clean_up(self, layout: Layout, key: str) -> None:
        """Remove a failed step's files on the board; if that fails too, the next run does it."""
        if not self._stop.is_set():
            with contextlib.suppress(FarmError):
                self._reconnected().change(layout, scripts.clean_up(layout, key), REMOVE_S, "cleaning up")

    def _reconnected(self) -> BoardShell:
        """A shell on a live connection, reconnected if necessary."""
        assert self._connection is not None
        for _ in range(_RECONNECTS):
            if not self._connection.lost.is_set():
                break
            with contextlib.suppress(FarmError):
                self._connection = SshConnection.connect(self.target.address, self._job.known_hosts)
            if self._stop.wait(0.5):
                raise Interrupted
        return self._shell()

    def _shell(self) -> BoardShell:
        assert self._connection is not None
        return BoardShell(self._connection, self._as_root, self._sudo)

    def _uninstall(self) -> ProvisioningOutcome:
        shell, layout = self._connect()
        files = render_files(layout, self.target.options)

        def work() -> tuple[None, StepStatus, str]:
            survey = fetch_survey(shell, layout, (), self._port)
            self._version = survey.current
            if survey.models:
                self._notes.append(f"deployed models stay in {layout.models}; `rm -r` there removes them")
            if not survey.ours:
                self._state = "nothing of ours is there"
                return None, StepStatus.ALREADY, f"nothing of ours in {layout.prefix}"
            if self._job.dry_run:
                self._state = "as before"
                return None, StepStatus.WOULD, f"remove {layout.prefix} and {survey.current or 'what is left'}"
            self._state = "partly removed; run the command again"
            shell.change(layout, scripts.uninstall(layout, files), REMOVE_S, "removing the installation")
            self._version, self._state = "", "nothing of ours is left there"
            return None, StepStatus.DONE, f"removed {layout.prefix}"

        with contextlib.ExitStack() as stack:
            if not self._job.dry_run:
                try:
                    stack.enter_context(self._job.hold(self.target.name))
                except FarmError as error:
                    self._note_step("hold", StepStatus.FAILED, str(error))
                    raise
            self._timed("remove", work)
        status = self._steps[-1].status
        return {StepStatus.ALREADY: ProvisioningOutcome.UNCHANGED, StepStatus.WOULD: ProvisioningOutcome.PLANNED}.get(
            status, ProvisioningOutcome.REMOVED
        )
