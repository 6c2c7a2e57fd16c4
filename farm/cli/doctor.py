"""`farm doctor`: go through every hop, from the configuration to a kernel run on the board; name the one that fails."""

from __future__ import annotations

from rich import markup

from farm import settings as farm_settings
from farm.cli import options, output


def doctor(json: options.Json = False, debug: options.Debug = False) -> None:
    """Check every part of the farm, ending with a kernel really built here and run on this machine's board."""

    def work() -> None:
        from farm.campaign.doctor import Check, examine

        settings = farm_settings.load()
        checks: list[Check] = []

        def show(check: Check) -> None:
            checks.append(check)
            if not json:
                mark = "[green]ok  [/]" if check.ok else "[red]FAIL[/]"
                output.stdout.print(f"{mark} {check.name:<12} {markup.escape(check.detail)}", soft_wrap=True)

        examine(settings, show)
        if json:
            output.print_json([{"name": c.name, "ok": c.ok, "detail": c.detail, "seconds": c.seconds} for c in checks])
        if not all(check.ok for check in checks):
            raise SystemExit(3)

    output.run(work, debug)
