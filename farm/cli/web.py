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
from farm.web import access, running, tokens
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
) -> None:
    """Serve the farm's page and API, until Ctrl-C. Reading needs no token on this machine; changing does."""
    if context.invoked_subcommand is not None:
        return
    require_server()

    place = serving.WebPlace(host, port, tls_cert, tls_key, tuple(name or ()))
    serving.serve(farm_settings.load(), place, lambda url: output.stderr.print(f"the farm's page: {url}"))


tokens_app = typer.Typer(help="Tokens. The farm's own, and named ones of people and scripts with a role.")
app.add_typer(tokens_app, name="token")
Who = Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is: a person's name, or a script's.")]


@tokens_app.callback(invoke_without_command=True)
@output.command
def token(
    context: typer.Context,
    new: Annotated[bool, typer.Option("--new", help="Make another token: the old one and its sessions end.")] = False,
) -> None:
    """Print the farm's own token, with which the page and the API let you change everything."""
    if context.invoked_subcommand is not None:
        return
    require_server()

    print(access.read_token(farm_settings.load().home_path, renew=new))


@tokens_app.command("add")
@output.command
def add_token(
    name: Who,
    role: Annotated[
        Literal["reader", "user", "operator"],
        typer.Option("--role", help="reader: read; user: also reserve boards, order own campaigns; operator: all."),
    ] = "reader",
) -> None:
    """Create a named token; it replaces an older one of that name. It is printed once and not kept."""
    require_server()

    home, by = farm_settings.load().home_path, machine.name_user()
    made = tokens.add(home, name, tokens.Role(role), by)
    _note("token_added", name, f"role {role}", by)
    print(made)


@tokens_app.command("list")
@output.command
def list_tokens() -> output.Document:
    """List tokens. Whose they are and what they may do; never the tokens."""
    require_server()

    entries = tokens.read_entries(farm_settings.load().home_path)
    yield (
        [{"name": each.name, "role": str(each.role), "created_at": each.created_at, "by": each.by} for each in entries]
    )
    tables.print_table(
        ("Name", "Role", "Since", "Made by"),
        [(each.name, str(each.role), output.moment(each.created_at), each.by) for each in entries],
        left=(0, 1, 2, 3),
        empty="no named tokens; `farm web token add NAME --role user` makes one",
    )


@tokens_app.command("remove")
@output.command
def remove_token(name: Who) -> None:
    """Revoke a named token and end its sessions."""
    require_server()

    tokens.remove(farm_settings.load().home_path, name)
    _note("token_removed", name, "", machine.name_user())
    output.stdout.print(f"the token of {name} is no more", markup=False)


def _note(kind: str, name: str, message: str, by: str) -> None:
    with options.open_store() as store:
        store.events.add(kind, name, message, by)


@app.command("url")
@output.command
def url() -> None:
    """Print where the page is served. Exit code 3 where it is not."""
    found = running.find_url(farm_settings.load().home_path)
    if found is None:
        raise UnavailableError("the farm's page is not served", "`farm web` or `farm up --web` serves it.")
    print(found)


def require_server() -> None:
    """Raise UnavailableError where the page's packages are not installed."""
    missing = [each for each in ("fastapi", "uvicorn") if importlib.util.find_spec(each) is None]
    if missing:
        raise UnavailableError(
            f"the page needs {' and '.join(missing)}", "Install tvm-farm's extra `web`; `make setup` does."
        )
