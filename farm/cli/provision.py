"""`farm board provision`: put the agent on boards, bring it up to date, remove it; `farm board bundle`: its file."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.artifacts import artifact_folder
from farm.cli import first_contact, options, output, tables
from farm.connectivity import host_keys, services, ssh_config
from farm.crew import calibration
from farm.errors import FarmError, UsageError
from farm.processes import machine
from farm.provision import board as provision_board
from farm.provision import boards, bundle_build, interpreters, layout, plan
from farm.provision import bundle as provision_bundle
from farm.search.codegen import golden
from farm.settings import Settings
from farm.store import standing
from farm.values import Health, Ssh

# The agent starts within seconds; the farm's connection to the board may be in its retry pause.
_REACH_TIMEOUT_S = 60.0
# For the proof of provisioning: a probe of a board that has just started its agent.
_PROBE_TIMEOUT_S = 90.0
_OUT_OF_SERVICE = (Health.MAINTENANCE, Health.RETIRED, Health.UNSAFE)


@output.command
def provision(
    names: options.Boards,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Bundle to install; default: one made here, and kept."),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix",
            metavar="DIR",
            help="Folder on the board; default: /opt/tvm-farm, or one below the login's home.",
        ),
    ] = "",
    uninstall: Annotated[
        bool, typer.Option("--uninstall", help="Remove everything that this command installed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False,
) -> output.Document:
    """Install or update the agent on boards. Goes over SSH and proves that the agent works. Safe to run again."""
    settings = farm_settings.load()
    settings.share_linker_cache()
    targets = _find_targets(settings, names)
    known_hosts = host_keys.KnownHosts(settings.home_path / host_keys.FILE_NAME)
    addresses = {target.name: target.address for target in targets}
    unknown = [name for name, at in addresses.items() if not at.host_key and not known_hosts.find(at.host, at.port)]
    refused = first_contact.confirm_host_keys(addresses, known_hosts, ask=first_contact.find_asker())
    going = [target for target in targets if target.name not in refused]
    reports = {name: _refused(name, error) for name, error in refused.items()}
    with contextlib.ExitStack() as stack:
        proof = _Proof(settings, [target.name for target in going], set(unknown), stack)
        job = provision_board.ProvisioningJob(
            bundle_build.BundleCache(settings.home_path / "cache" / "bundles", bundle, output.tell),
            proof,
            known_hosts,
            prefix,
            dry_run,
            uninstall,
            boards.StoreHold(lambda: options.open_store(settings), f"{machine.name_user()}:{os.getpid()}"),
            _show_step,
        )
        if going:
            reports |= {report.board: report for report in boards.provision_boards(going, job)}
        notes = proof.record_health(
            [r.board for r in reports.values() if r.outcome is plan.ProvisioningOutcome.PROVISIONED]
        )
    yield from _tell_all([reports[name] for name in addresses], notes)


class _Proof:
    """Proves boards through the farm's services, which start for the first board that needs them."""

    def __init__(self, settings: Settings, names: list[str], unknown: set[str], stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._names = names
        self._unknown = unknown
        self._stack = stack
        self._lock = threading.Lock()
        self._services: services.Services | None = None
        self._kernels = golden.GoldenKernels(settings.home_path / calibration.KERNEL_FOLDER)

    def __call__(self, target: provision_board.ProvisioningTarget) -> str:
        with self._lock:
            if self._services is None:
                self._services = self._stack.enter_context(
                    services.using_services(self._settings, self._names, output.tell)
                )
                if self._unknown:  # ways that were refused until now
                    self._services.retry(sorted(self._unknown))
        self._services.wait_reachable(target.name, _REACH_TIMEOUT_S)
        return boards.prove(self._services.tracker, self._kernels, target)

    def record_health(self, names: list[str]) -> dict[str, str]:
        """Have the services probe new or changed boards; return their answers by board. Never raises."""
        if self._services is None or not names:
            return {}
        with options.open_store(self._settings) as store:
            names = [name for name in names if store.boards.require(name).health not in _OUT_OF_SERVICE]
        try:
            answers = self._services.probe(names, _PROBE_TIMEOUT_S) if names else []
        except FarmError as error:
            return dict.fromkeys(names, f"not probed: {error.message}")
        return {
            answer["board"]: "" if answer.get("passed") else f"its probe says: {answer.get('reason', 'nothing')}"
            for answer in answers
        }


def _find_targets(settings: Settings, names: list[str]) -> list[provision_board.ProvisioningTarget]:
    """Return boards by name, each once. Raises UsageError for one that SSH does not reach or that is not known."""
    targets = []
    with options.open_store(settings) as store:
        for name in dict.fromkeys(names):
            board = store.boards.require(name)
            transport = standing.parse_transport(board.transport)
            if not isinstance(transport, Ssh):
                raise UsageError(
                    f"board {name!r} is {transport.kind}: the farm starts its agent itself",
                    "Only boards that are reached over SSH are provisioned.",
                )
            agent = layout.AgentOptions(
                name, board.board_type, transport.agent_port, transport.tracker_port, transport.meter
            )
            targets.append(provision_board.ProvisioningTarget(name, ssh_config.to_ssh_address(transport), agent))
    return targets


def _refused(name: str, error: FarmError) -> plan.BoardReport:
    step = plan.StepReport("connect", plan.StepStatus.FAILED, str(error), 0.0)
    return plan.BoardReport(name, plan.ProvisioningOutcome.FAILED, "", "nothing was done to it", (step,))


def _show_step(name: str, step: plan.StepReport) -> None:
    seconds = f" ({step.seconds:.1f} s)" if step.seconds >= 0.05 else ""
    output.tell(f"{name}: {step.name}: {step.status}{f', {step.detail}' if step.detail else ''}{seconds}")


def _tell_all(reports: list[plan.BoardReport], notes: dict[str, str]) -> output.Document:
    """Print the result of each board; the exit code is 1 where one failed, 130 after Ctrl-C."""
    code = 1 if any(report.outcome not in plan.GOOD for report in reports) else None
    if any(report.outcome is plan.ProvisioningOutcome.INTERRUPTED for report in reports):
        code = output.INTERRUPTED
    documents = [report.to_dict() | {"probe": notes.get(report.board, "")} for report in reports]
    yield output.Failed({"boards": documents}, code)
    rows = [(r.board, r.outcome, r.version, _tell(r, notes.get(r.board, ""))) for r in reports]
    tables.print_table(("Board", "Outcome", "Version", "State"), rows, left=(0, 1, 2, 3))


def _tell(report: plan.BoardReport, note: str) -> str:
    """Print how a board is left, and why."""
    failed = next((step for step in report.steps if step.status is plan.StepStatus.FAILED), None)
    return "\n".join(filter(None, (f"{failed.name}: {failed.detail}" if failed else "", report.state, note)))


@output.command
def bundle(
    arch: Annotated[str, typer.Option("--arch", metavar="aarch64|x86_64", help="Architecture of the board.")],
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="3.11|managed|FILE",
            help="Python version of the boards, repeatable; for boards with an older one, a Python that uv fetches "
            "(managed), or an archive of python-build-standalone.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="File or folder to write; default: a name made up here."),
    ] = None,
) -> output.Document:
    """Fetch and pack what boards of one machine need. Equal inputs give equal files."""
    farm_settings.load().share_linker_cache()
    asked = dict.fromkeys(python or ())
    archive = next((Path(each) for each in asked if ".tar." in each), None)
    pythons = tuple(each for each in asked if each != "managed" and ".tar." not in each)
    # A bundle with its own interpreter serves every board; else it is for the commonest Python.
    pythons = pythons or (() if archive else (interpreters.MANAGED_PYTHON,))
    recipe = bundle_build.BundleRecipe(arch, pythons, "managed" in asked and archive is None, archive)
    called = f"tvm-farm-{arch}-{'-'.join(pythons) or 'python'}.tar"
    path = Path(called) if out is None else out / called if out.is_dir() else out
    artifact_folder.require_room(path.parent)
    made = bundle_build.build_bundle(recipe, path.absolute(), lambda text: output.stderr.print(text, markup=False))
    yield from _tell_bundle(made)


def _tell_bundle(bundle: provision_bundle.Bundle) -> output.Document:
    manifest = bundle.manifest
    yield {
        "path": str(bundle.path),
        "bytes": bundle.size,
        "key": manifest.key,
        "version": manifest.version,
        "arch": manifest.arch,
        "pythons": list(manifest.pythons),
        "managed_python": manifest.managed_python or None,
        "unpacked_bytes": manifest.unpacked_bytes,
        "files": dict(manifest.files),
    }
    facts = {
        "Bundle": f"{bundle.path}, {bundle.size / 1e6:.0f} MB",
        "Version": manifest.key,
        "For": f"{manifest.arch}, Python {' or '.join(manifest.pythons)}",
        "Brings": manifest.managed_python or "no Python: the board's own is used",
        "Installed": f"{manifest.unpacked_bytes / 1e6:.0f} MB and its bytecode",
    }
    tables.print_facts(facts)
    tables.print_table(("File", "SHA-256"), [(name, sha256) for name, sha256 in manifest.files.items()], left=(0, 1))
