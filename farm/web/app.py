"""The application: routes, the guard before them, and error replies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.errors import FarmError
from farm.foreign import say_plainly
from farm.settings import Settings
from farm.version import __version__
from farm.web import api, live, pages, result_pages, work_pages
from farm.web.access import COOKIE, HEADERS, MEDIA_TYPE, SAFE, Access, ProblemDetails, Refused, find_role, from_error
from farm.web.live import Hub
from farm.web.pages import show
from farm.web.view import View

router = APIRouter(include_in_schema=False)
# Requests served at once; others wait. Each has a store of its own.
THREADS = 8
_STATIC = Path(__file__).with_name("static")
# Clients that have not signed in see these, from any address.
_OPEN = ("/static/", "/sign-in", "/healthz")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RouteRow:
    """One route; `takes` and `sends` are fields with their types, `role` is empty for reading."""

    method: str
    path: str
    what: str
    takes: tuple[str, ...]
    sends: tuple[str, ...]
    gives: str
    role: str


@router.get("/docs")
def show_docs(request: Request) -> HTMLResponse:
    """Show what the API offers."""
    described = request.app.openapi()
    return show(
        request,
        "docs.html",
        rows=list_rows(described),
        described=described["info"]["description"],
        url=f"{api.PREFIX}/openapi.json",
        command="farm web token",
    )


def list_rows(described: Mapping[str, Any]) -> list[RouteRow]:
    """Return the routes of an OpenAPI document, in its order."""
    schemas = described["components"]["schemas"]
    return [
        RouteRow(
            method.upper(),
            path,
            route["description"],
            tuple(_name(each["name"], each["schema"]) for each in route.get("parameters", ()) if each["in"] == "query"),
            _list_fields(_find_schema(route.get("requestBody", {})), schemas),
            str(_find_schema(route["responses"]["200"]).get("$ref", "")).rpartition("/")[2],
            "" if method.upper() in SAFE else str(find_role(path)),
        )
        for path, routes in described["paths"].items()
        for method, route in routes.items()
    ]


def _find_schema(part: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = part.get("content", {}).get("application/json", {}).get("schema", {})
    return found


def _list_fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[str, ...]:
    named = schemas.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return tuple(_name(name, field) for name, field in named.get("properties", {}).items())


def _name(name: str, schema: Mapping[str, Any]) -> str:
    kinds = [each.get("type", "") for each in schema.get("anyOf", (schema,))]
    return f"{name}: {' | '.join(kind for kind in kinds if kind)}"


# Forms and API calls are short and arrive at once.
_MOST_BYTES, _MOST_QUERY, _BODY_TIMEOUT_S = 64 << 10, 4096, 10.0


def make_app(settings: Settings, access: Access) -> FastAPI:
    """Return the application of one FARM_HOME."""
    app = FastAPI(
        title="tvm-farm",
        version=__version__,
        description="Boards, campaigns, sweeps and records of a farm. Documents are those of the command line's "
        "`--json`. Stable within /api/v1: fields are added, none is taken away. Errors are problem documents (RFC "
        "9457).",
        openapi_url=f"{api.PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=_live,
    )
    view = View(settings, access)
    app.state.view, app.state.hub = view, Hub(view.look)
    for each in (api.router, pages.router, work_pages.router, result_pages.router, router):
        app.include_router(each)
    app.mount("/static", StaticFiles(directory=_STATIC))
    app.add_api_route(
        "/live", watch, response_class=EventSourceResponse, include_in_schema=False,
        dependencies=[Depends(_require_room)],
    )  # fmt: skip
    app.add_middleware(Guard, access=access)
    for kind in (FarmError, Refused, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _tell)
    app.add_exception_handler(Exception, _tell_bug)
    return app


@contextlib.asynccontextmanager
async def _live(app: FastAPI) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    tasks = [asyncio.create_task(app.state.hub.run()), asyncio.create_task(_warm(app.state.view))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        app.state.view.stores.close()


async def _warm(view: View) -> None:
    try:
        await anyio.to_thread.run_sync(view.warm)
    except FarmError as error:  # the first page says so too
        _log.warning("%s", error)


def _require_room(request: Request) -> None:
    if request.app.state.hub.watchers >= live.MOST_WATCHERS:
        raise Refused(503, f"{live.MOST_WATCHERS} pages are being kept up to date already", "Load the page by hand.")


async def watch(request: Request) -> AsyncIterator[ServerSentEvent]:
    """Stream changes as they happen."""
    async for event in request.app.state.hub.watch():
        yield event


class Guard:
    """Stands before every route: checks host, size of the body, and the right to read or change."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"], *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]  # fmt: skip
            await send(message)

        try:
            self._check(request)
            receive = await _receive_whole(request) if scope["method"] not in SAFE else receive
        except Refused as refused:
            await _answer(request, refused.problem)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _check(self, request: Request) -> None:
        headers, cookie, path = request.headers, request.cookies.get(COOKIE, ""), request.scope["path"]
        self._access.check_host(headers.get("host", ""))
        if len(request.scope["query_string"]) > _MOST_QUERY:
            raise Refused(414, f"what stands behind the ? is longer than {_MOST_QUERY} bytes")
        is_open = path.startswith(_OPEN) or self._access.private
        if not is_open and self._access.find_person(headers, cookie) is None:
            raise Refused(401, "reading needs the token here", "Sign in, or send it: Authorization: Bearer TOKEN.")
        if request.method in SAFE:
            return
        if path == "/sign-in":
            self._access.check_origin(headers)
        else:
            request.state.person = self._access.check_change(headers, cookie, path)


async def _receive_whole(request: Request) -> Receive:
    """Read the whole body first, so that no route sees half of a request. Refuses one that is too long or late."""
    chunks, size = [], 0
    try:
        with anyio.fail_after(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > _MOST_BYTES:
                    raise Refused(413, f"a request holds {_MOST_BYTES} bytes at most")
                chunks.append(chunk)
    except TimeoutError:
        raise Refused(408, f"the request was not there after {_BODY_TIMEOUT_S:g} s") from None
    body, told = b"".join(chunks), False

    async def receive() -> Message:
        nonlocal told
        if told:
            return await request.receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _tell(request: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        problem = error.problem
    elif isinstance(error, FarmError):
        problem = from_error(error)
    elif isinstance(error, RequestValidationError):
        problem = ProblemDetails(422, "; ".join(_say(each) for each in error.errors()[:5]))
    elif isinstance(error, HTTPException):
        problem = ProblemDetails(error.status_code, str(error.detail))
    else:
        problem = ProblemDetails(500, "the server failed")
    return _answer(request, problem)


async def _tell_bug(request: Request, error: Exception) -> Response:
    _log.exception("a request failed", exc_info=error)
    return _answer(
        request, ProblemDetails(500, f"{type(error).__name__}: this is a bug of tvm-farm", "The log says more.")
    )


def _say(error: dict[str, object]) -> str:
    where = error.get("loc") or ()
    name = str(where[-1]) if isinstance(where, tuple) and where else "the request"
    if error.get("type") == "extra_forbidden":
        return f"{name}: there is no such field"
    return f"{name}: {say_plainly(re.sub(r'^Value error, ', '', str(error.get('msg'))))}"


def _answer(request: Request, problem: ProblemDetails) -> Response:
    path: str = request.scope["path"]
    if path.startswith(api.PREFIX) or path == "/live":
        how = {"www-authenticate": "Bearer"} if problem.status == 401 else None
        return JSONResponse(problem.to_document(), problem.status, headers=how, media_type=MEDIA_TYPE)
    if problem.status == 401 and request.method in SAFE:
        return RedirectResponse("/sign-in", 303)
    return pages.show(request, "problem.html", status=problem.status, problem=problem.to_document(), command="")
