"""The definition document of a workflow: what may stand in it, and how its steps hang together.

Invariant: a document that `check` lets pass can be run; every refusal names the step and the field. Nothing here
touches the app, the database or a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Sequence

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import DefinitionError, InputError
from interlock.model.backoff import Backoff
from interlock.model.json_values import check_json
from interlock.model.options import CHECKS
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, is_in_calendar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

KINDS = ("plain", "decision", "map", "child", "sleep", "signal", "approval")
WITH_HANDLER = frozenset({"plain", "decision", "map"})
BUILT_IN = "interlock.pass"  # the handler of every step that has none of its own

STEP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,499}")  # an index of the database holds it
VERSION = re.compile(r"[A-Za-z0-9_.+-]{1,100}")
HEAD = ("name", "version", "namespace", "input_schema", "timeout", "steps")
_EVERYWHERE = ("name", "kind", "type", "namespace", "after", "after_failure", "join", "priority", "config")
_HANDLED = ("max_tries", "backoff", "timeout", "limit_key", "tags", "callback_url")
_UNDONE = ("compensate", *(f"compensate_{of}" for of in ("tries", "timeout", "limit_key", "tags", "callback_url")))
FIELDS: Mapping[str, tuple[str, ...]] = {
    "plain": (*_EVERYWHERE, *_HANDLED, *_UNDONE),
    "decision": (*_EVERYWHERE, *_HANDLED, *_UNDONE, "branches"),
    "map": (*_EVERYWHERE, *_HANDLED, "over", "over_input", "strategy"),
    "child": (*_EVERYWHERE, *_UNDONE, "workflow", "workflow_version", "wait", "input"),
    "sleep": (*_EVERYWHERE, "seconds", "until"),
    "signal": (*_EVERYWHERE, "signal", "timeout"),
    "approval": (*_EVERYWHERE, "timeout"),
}
_KNOWN = frozenset(name for names in FIELDS.values() for name in names)


class GraphError(DefinitionError):
    """A workflow's definition makes no sense; `path` leads to the field: ("steps", 2, "after")."""

    def __init__(
        self, message: str, *, workflow: str = "", step: str | None = None, path: tuple[Any, ...] = ()
    ) -> None:
        self.told = message
        self.path = path
        self.step = step
        places = [f"workflow {workflow}" if workflow else "workflow"]
        places += [] if step is None else [f"step {step!r}"]
        places += [path[-1]] if path and isinstance(path[-1], str) else []
        super().__init__(": ".join((*places, message)))


class Edge(NamedTuple):
    """What one step has to do with another that comes after it."""

    upstream: str
    downstream: str
    condition: str
    branch: bool


class _Place:
    """Where in a document something is checked: the whole, or one step."""

    def __init__(self, workflow: str, index: int | None = None, step: str | None = None) -> None:
        self._workflow = workflow
        self._index = index
        self._step = step

    def refuse(self, field: str, message: str) -> GraphError:
        path = (field,) if self._index is None else ("steps", self._index, field)
        return GraphError(message, workflow=self._workflow, step=self._step, path=path)

    def take(self, field: str, value: Any, check: Callable[[str, Any], Any]) -> None:
        try:
            check(field, value)
        except (ValueError, DefinitionError, InputError) as error:
            raise self.refuse(field, str(error)) from None


def check(document: Mapping[str, Any]) -> None:
    """Refuse a document that could not be run, with a GraphError that names the place."""
    check_head(document)
    steps = document.get("steps")
    if not isinstance(steps, list | tuple) or not steps:
        raise _Place(document["name"]).refuse("steps", "a workflow needs a list of one step or more")
    places = _places(document["name"], steps)
    for step in steps:
        place = places[step["name"]]
        _check_step(place, step)
        _check_upstreams(place, step, places)
    _check_branches(places, steps)
    _check_cycles(places, steps)


def edges(document: Mapping[str, Any]) -> Iterator[Edge]:
    """List what every step waits for."""
    branches = {(step["name"], branch) for step in document["steps"] for branch in step.get("branches") or ()}
    for step in document["steps"]:
        name = step["name"]
        for upstream in step.get("after") or ():
            yield Edge(upstream, name, "success", (upstream, name) in branches)
        for upstream in step.get("after_failure") or ():
            yield Edge(upstream, name, "failure", branch=False)


def in_order(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Give the names of steps so that each comes after what it waits for; those of a cycle are left out."""
    waits = {step["name"]: len(_upstreams(step)) for step in steps}
    followers = _followers(steps)
    ordered = [name for name, count in waits.items() if count == 0]
    for name in ordered:  # it grows while it is read
        for follower in followers.get(name, ()):
            waits[follower] -= 1
            if waits[follower] == 0:
                ordered.append(follower)
    return ordered


def _followers(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    followers: dict[str, list[str]] = {}
    for step in steps:
        for upstream in _upstreams(step):
            followers.setdefault(upstream, []).append(step["name"])
    return followers


def check_head(document: Any) -> None:
    """Do the same for what a document says beside its steps."""
    if not isinstance(document, Mapping):
        raise GraphError(f"a definition is a mapping of {', '.join(HEAD)}, not {type(document).__name__}")
    place = _Place(str(document.get("name") or ""))
    for key in document:
        if key not in HEAD:
            raise place.refuse(str(key), f"there is no such field{_meant(key, HEAD)}; known are {', '.join(HEAD)}")
    for field, needed in (("name", _named), ("version", _version), ("namespace", CHECKS["namespace"])):
        place.take(field, document.get(field), needed)
    for field, check_field in (("timeout", _span), ("input_schema", _schema)):
        if document.get(field) is not None:
            place.take(field, document[field], check_field)


def check_step(workflow: str, index: int, step: dict[str, Any]) -> None:
    """Do the same for one step by itself, whatever its place among the others."""
    (place,) = _places(workflow, [step], index).values()
    _check_step(place, step)


def _places(workflow: str, steps: Sequence[dict[str, Any]], first: int = 0) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for index, step in enumerate(steps, first):
        if not isinstance(step, dict):
            raise GraphError(
                f"step number {index + 1} must be a mapping, not {type(step).__name__}",
                workflow=workflow,
                path=("steps", index),
            )
        name = step.get("name")
        here = _Place(workflow, index, str(name) if name else f"number {index + 1}")
        here.take("name", name, _named)
        if name in places:
            raise here.refuse("name", "there are two steps of this name; give one of them another")
        places[str(name)] = here
    return places


def _check_step(place: _Place, step: dict[str, Any]) -> None:
    kind = step.get("kind", "plain")
    if kind not in KINDS:
        raise place.refuse("kind", f"must be one of {', '.join(KINDS)}, not {kind!r}")
    _check_fields(place, kind, step)
    if kind in WITH_HANDLER and step.get("type") is None:
        raise place.refuse("type", f"a step of kind {kind} needs a handler")
    needed = _NEEDED.get(kind, ())
    if needed and sum(step.get(field) is not None for field in needed) != 1:
        both = "" if len(needed) == 1 else ", and not both"
        raise place.refuse(needed[0], f"a step of kind {kind} needs {' or '.join(needed)}{both}")


def _check_fields(place: _Place, kind: str, step: dict[str, Any]) -> None:
    allowed = FIELDS[kind]
    for field, value in step.items():
        if field not in _KNOWN:
            known = ", ".join(allowed)
            raise place.refuse(str(field), f"there is no such field{_meant(field, allowed)}; known: {known}")
        if value is None:
            continue
        if field not in allowed:
            raise place.refuse(field, f"a step of kind {kind} has no such field; it has {', '.join(allowed)}")
        if field in _CHECKS:
            place.take(field, value, _CHECKS[field])
        place.take(field, value, _is_json)


def _check_upstreams(place: _Place, step: dict[str, Any], places: Mapping[str, _Place]) -> None:
    seen: dict[str, str] = {}
    for field in ("after", "after_failure"):
        for upstream in step.get(field) or ():
            if upstream not in places:
                raise place.refuse(field, f"there is no step {upstream!r}{_meant(upstream, places)}")
            if upstream in seen:
                both = "in after and in after_failure" if seen[upstream] != field else "twice"
                raise place.refuse(field, f"names {upstream!r} {both}; a step waits for another in one way")
            seen[upstream] = field
    over = step.get("over")
    if over is not None and seen.get(over) != "after":
        raise place.refuse("over", f"{over!r} must stand in after too: its result is what the map goes over")


def _check_branches(places: Mapping[str, _Place], steps: Sequence[dict[str, Any]]) -> None:
    upstreams = {step["name"]: step.get("after") or () for step in steps}
    for step in steps:
        place, name = places[step["name"]], step["name"]
        for branch in step.get("branches") or ():
            if branch not in places:
                raise place.refuse("branches", f"there is no step {branch!r}{_meant(branch, places)}")
            if name not in upstreams[branch]:
                raise place.refuse("branches", f"{branch!r} is no branch of it: it does not name {name!r} in its after")


def _check_cycles(places: Mapping[str, _Place], steps: Sequence[dict[str, Any]]) -> None:
    ordered = set(in_order(steps))
    left = {step["name"]: _upstreams(step) for step in steps if step["name"] not in ordered}
    if not left:
        return
    name, walked = next(iter(left)), dict[str, None]()
    while name not in walked:
        walked[name] = None
        name = next(upstream for upstream in left[name] if upstream in left)
    names = list(walked)
    cycle = [*names[names.index(name) :], name][::-1]
    raise places[name].refuse("after", f"the steps wait for each other in a circle: {' -> '.join(cycle)}")


def _upstreams(step: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(step.get("after") or ()), *(step.get("after_failure") or ()))


def _meant(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _named(field: str, value: Any) -> None:
    if not isinstance(value, str) or not STEP_NAME.fullmatch(value):
        told = f"a {field} is made of letters, digits, _ . - and begins with a letter or _, 500 in all at most"
        raise ValueError(f"{told}, not {value!r:.100}")


def _version(field: str, value: Any) -> None:
    if not isinstance(value, str) or not VERSION.fullmatch(value):
        told = f"a {field} is a text of at most 100 letters, digits and . _ + -, e.g. '1' or '2.0'"
        raise ValueError(f"{told}, not {value!r:.100}")


def _names(field: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{field} must be a list of the names of steps, not {value!r}")


def _branches(field: str, value: Any) -> None:
    _names(field, value)
    if not value or len(set(value)) != len(value):
        raise ValueError(f"{field} must name one step or more, each once, not {value!r}")


def _share(field: str, value: Any) -> None:
    is_ratio = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    if not is_ratio and value not in ("all", "any"):
        raise ValueError(f"{field} must be 'all', 'any' or a ratio above 0 and up to 1, not {value!r}")


def _of(kind: type, words: str) -> Callable[[str, Any], None]:
    def check_type(field: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{field} must be {words}, not {value!r}")  # noqa: TRY004 - all refusals are ValueErrors

    return check_type


def _moment(field: str, value: Any) -> None:
    CHECKS["unique_key"](field, value)  # a text
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        if value[0].isdigit():
            raise ValueError(f"{field} is neither a time in ISO 8601 nor a field of the input: {value!r}") from None
        return
    if moment.tzinfo is None:
        raise ValueError(f"{field} needs a time zone, e.g. {value}+00:00")
    if not is_in_calendar(moment):
        raise ValueError(f"{field} must be in the years {FIRST_YEAR} to {LAST_YEAR}, not {value!r}")


def _span(field: str, value: Any) -> None:
    CHECKS["timeout"](field, value)


def _is_json(field: str, value: Any) -> None:
    del field
    check_json(value)


def _schema(field: str, value: Any) -> None:
    # not at the top: it is slow to import, and many workflows have no schema
    from interlock.model.json_schema import check_schema  # noqa: PLC0415 - heavy, and seldom needed

    _MAPPING(field, value)
    check_json(value)
    check_schema(value)


_MAPPING = _of(dict, "a mapping")
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **{name: CHECKS[name] for name in ("namespace", "priority", "max_tries")},
    **{name: CHECKS[name] for name in ("limit_key", "tags", "callback_url")},
    **{f"compensate_{name}": CHECKS[name] for name in ("limit_key", "tags", "callback_url")},
    "compensate_tries": CHECKS["max_tries"],
    **dict.fromkeys(("timeout", "seconds", "compensate_timeout"), _span),
    **dict.fromkeys(("type", "compensate", "over", "over_input", "signal"), CHECKS["unique_key"]),
    "after": _names,
    "after_failure": _names,
    "join": _share,
    "strategy": _share,
    "config": _MAPPING,
    "backoff": lambda _, value: Backoff.from_json(value),
    "branches": _branches,
    "workflow": _named,
    "workflow_version": _version,
    "wait": _of(bool, "true or false"),
    "input": _MAPPING,
    "until": _moment,
}
# of which fields a kind needs exactly one
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "decision": ("branches",),
    "map": ("over", "over_input"),
    "child": ("workflow",),
    "sleep": ("seconds", "until"),
    "signal": ("signal",),
}


def chosen(branches: Sequence[str], returned: Any) -> list[str]:
    """Give the branches that a decision chose, each once; PermanentError when it names what is none."""
    names = [returned] if isinstance(returned, str) else returned
    if not isinstance(names, list | tuple | set | frozenset):
        raise PermanentError(
            f"a decision returns the name of a branch or a list of names, not {type(returned).__name__}; "
            f"its branches are {', '.join(branches)}"
        )
    for name in names:
        if name not in branches:
            raise PermanentError(f"the decision chose {name!r}, which is none of its branches: {', '.join(branches)}")
    return [name for name in branches if name in names]


def approved(answer: Any) -> Any:
    """Give a person's answer back if it is a yes; PermanentError says who rejected, and why."""
    given = answer if isinstance(answer, dict) else {}
    if given.get("approved") is True:
        return answer
    comment = given.get("comment")
    raise PermanentError(f"rejected by {given.get('by') or 'somebody'}" + (f": {comment}" if comment else ""))


ALL = 1.0


ANY = 0.0


MAP = "map"


MOST_PARTS = 1_000_000


NO_LIST = 'a map goes over a list, or over whole numbers such as {"start": 0, "stop": 1000, "size": 100}, by 1 or more'


def too_many_parts(parts: int) -> str:
    """Say that a map would have more parts than it may."""
    return f"a map has at most {MOST_PARTS:,} parts, and this one would have {parts:,}"


def share(rule: str | float | None) -> float:
    """Give the share that a join or a strategy asks for: 1 is all of them, 0 is any of them."""
    return {"all": ALL, "any": ANY}[rule] if isinstance(rule, str) else ALL if rule is None else float(rule)
