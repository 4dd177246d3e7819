"""Templates and static files of the dashboard.

Invariant: every value is escaped (autoescape is on, and no template switches it off); pages run no script and no style
but the static files of this package, which are named by their content and cached for ever.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from interlock.dashboard import format as formats
from interlock.dashboard.states import state_style, state_word

if TYPE_CHECKING:
    from markupsafe import Markup

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
STATIC_FILES = ("dash.css", "dash.js", "icons.svg", "ops.css", "ops.js", "work.css", "work.js")
HASH_LENGTH = 8


@cache
def read_static(name: str) -> bytes:
    """Read a static file of the package."""
    return files("interlock.dashboard").joinpath("static", name).read_bytes()


@cache
def build_hash() -> str:
    """Return the hash of all static files: a page of another build loads itself again."""
    digest = hashlib.sha256(version("interlock").encode())
    for name in STATIC_FILES:
        digest.update(read_static(name))
    return digest.hexdigest()[:HASH_LENGTH]


def static_url(name: str) -> str:
    """Return the URL of a static file; another content has another URL."""
    return f"/ui/static/{build_hash()}/{name}"


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    env = Environment(
        loader=PackageLoader("interlock.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        whole=formats.whole,
        compact=formats.compact,
        rate=formats.rate,
        seconds=formats.seconds,
        duration=formats.duration,
        iso=formats.iso,
        exact=formats.exact,
        short_id=formats.short_id,
        time_parts=formats.time_parts,
        word=state_word,
    )
    env.globals.update(
        static_url=static_url,
        state_style=state_style,
        ago=formats.ago,
        build=build_hash(),
        release=version("interlock"),
    )
    return env


def render(template: str, **values: Any) -> str:
    """Render a template."""
    return environment().get_template(template).render(**values)


def render_macro(template: str, macro: str, *arguments: Any, **values: Any) -> Markup:
    """Render one macro of a template, for a fragment that is sent to pages that are open already."""
    module = environment().get_template(template).module
    rendered: Markup = getattr(module, macro)(*arguments, **values)
    return rendered
