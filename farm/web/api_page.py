"""The page `/docs`: what `/api/v1` offers, as its own OpenAPI document says. Nothing is fetched from elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from farm.web import api
from farm.web.access import SAFE, find_role
from farm.web.pages import show

router = APIRouter(include_in_schema=False)


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
    """What the API offers."""
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
    """The routes of an OpenAPI document, in its order."""
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
