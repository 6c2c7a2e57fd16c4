"""`farm web`: serve the page and the API; tokens and the address."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from farm import settings as farm_settings
from farm.cli import options, output, tables
from farm.errors import UnavailableError
from farm.processes import machine
from farm.web import access, running
from farm.web import serve as serving

app = typer.Typer(help="The farm's page and API: serve it, its token, its address.")


@app.callback(invoke_without_command=True)
@output.command
def serve(
    context: typer.Context,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="First port tried; 0: any that is free.")
    ] = 8642,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; another than loopback needs TLS.")
    ] = "127.0.0.1",
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate, with those above it (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key (PEM).")] = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="Host name that is answered to; repeatable.")
    ] = None,
    url: Annotated[
        bool, typer.Option("--url", help="Only print where the page is served; exit code 3 where it is not.")
    ] = False,
) -> None:
    """Serve the farm's page and API, until Ctrl-C. Reading needs no token on this machine; changing does."""
    if context.invoked_subcommand is not None:
        return
    if url:
        if (found := running.find_url(farm_settings.load().home_path)) is None:
            raise UnavailableError("the farm's page is not served", "`farm web` or `farm up --web` serves it.")
        print(found)
        return
    require_server()

    place = serving.WebPlace(host, port, tls_cert, tls_key, tuple(name or ()))
    serving.serve(farm_settings.load(), place, lambda url: output.stderr.print(f"the farm's page: {url}"))


@app.command("token")
@output.command
def token(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Whose token it is: a person's name, or a script's.")
    ] = "",
    role: Annotated[
        Literal["reader", "user", "operator"],
        typer.Option("--role", help="reader: read; user: also reserve boards, order own campaigns; operator: all."),
    ] = "reader",
    new: Annotated[
        bool, typer.Option("--new", help="Make the farm's own anew: the old one and its sessions end.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Revoke NAME's token and end its sessions.")] = False,
    every: Annotated[bool, typer.Option("--list", help="List the named tokens.")] = False,
) -> output.Document:
    """Print the farm's own token, which lets you change everything; or make a named one with a role.

    A named token is printed once and not kept; it replaces an older one of that name.
    """
    require_server()
    home, by = farm_settings.load().home_path, machine.name_user()
    if every:
        yield from _list_tokens(home)
    elif not name:
        text = access.read_token(home, renew=new)
        yield {"token": text}
        print(text)
    elif remove:
        access.remove(home, name)
        _note("token_removed", name, "", by)
        yield {"removed": name}
        output.stdout.print(f"the token of {name} is no more", markup=False)
    else:
        made = access.add(home, name, access.Role(role), by)
        _note("token_added", name, f"role {role}", by)
        yield {"token": made, "name": name, "role": role}
        print(made)


def _list_tokens(home: Path) -> output.Document:
    entries = access.read_entries(home)
    yield [
        {"name": each.name, "role": str(each.role), "created_at": each.created_at, "by": each.by} for each in entries
    ]
    tables.print_table(
        ("Name", "Role", "Since", "Made by"),
        [(each.name, str(each.role), output.moment(each.created_at), each.by) for each in entries],
        left=(0, 1, 2, 3),
        empty="no named tokens; `farm web token NAME --role user` makes one",
    )


def _note(kind: str, name: str, message: str, by: str) -> None:
    with options.open_store() as store:
        store.events.add(kind, name, message, by)


def require_server() -> None:
    """Raise UnavailableError where the page's packages are not installed."""
    missing = [each for each in ("fastapi", "uvicorn") if importlib.util.find_spec(each) is None]
    if missing:
        raise UnavailableError(
            f"the page needs {' and '.join(missing)}", "Install tvm-farm's extra `web`; `make setup` does."
        )
