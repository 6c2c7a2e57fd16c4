"""`farm web`: the page and the API; its address and its token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farm import settings as farm_settings
from farm.cli import output
from farm.errors import UnavailableError

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
    from farm.web import serve as serving

    place = serving.Place(host, port, tls_cert, tls_key, tuple(name or ()))
    serving.serve(farm_settings.load(), place, lambda url: output.stderr.print(f"the farm's page: {url}"))


@app.command("token")
@output.command
def token(
    new: Annotated[bool, typer.Option("--new", help="Make another token: the old one and all sessions end.")] = False,
) -> None:
    """Print the token with which the page and the API let you change things."""
    require_server()
    from farm.web.access import read_token

    print(read_token(farm_settings.load().home_path, renew=new))


@app.command("url")
@output.command
def url() -> None:
    """Print where the page is served. Exit code 3 where it is not."""
    from farm.web.running import find_url

    found = find_url(farm_settings.load().home_path)
    if found is None:
        raise UnavailableError("the farm's page is not served", "`farm web` or `farm up --web` serves it.")
    print(found)


def require_server() -> None:
    """Refuse where the page's packages are not installed. Raises UnavailableError."""
    import importlib.util

    missing = [each for each in ("fastapi", "uvicorn") if importlib.util.find_spec(each) is None]
    if missing:
        raise UnavailableError(
            f"the page needs {' and '.join(missing)}", "Install tvm-farm's extra `web`; `make setup` does."
        )
