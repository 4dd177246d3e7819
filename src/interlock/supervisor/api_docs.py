"""The pages that describe the API to people: all of it comes from here, nothing from another host.

Invariant: the pages work without a network, and run no script but their own.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}


@router.get("/docs")
async def show_docs() -> Response:
    """Give the page."""
    return _file("docs.html")


@router.get("/docs/docs.js")
async def show_script() -> Response:
    """Give the script that turns the OpenAPI document into the page."""
    return _file("docs.js")


@router.get("/docs/docs.css")
async def show_style() -> Response:
    """Give its style."""
    return _file("docs.css")


def _file(name: str) -> Response:
    content = files("interlock.supervisor").joinpath("static", name).read_bytes()
    return Response(content, headers={"Content-Security-Policy": POLICY}, media_type=_TYPES[name])
