"""The definition document of a workflow: its fields, its checks and its graph of steps.

Invariant: a document that `check_definition` accepts can be run; every refusal names the step and the field. Nothing
here touches the app, the database or a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import DefinitionError, InputError, PermanentError
from interlock.model.backoff import Backoff
from interlock.model.json_values import check_json
from interlock.model.options import CHECKS, Scope, options_in
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, is_in_calendar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAP = "map"
STEP_KINDS = ("plain", "decision", MAP, "child", "sleep", "signal", "approval")
SINGLE_TASK_KINDS = frozenset({"plain", "decision"})  # the task of the step itself runs the user's handler
KINDS_WITH_HANDLER = SINGLE_TASK_KINDS | {MAP}  # the parts of a map run its handler
BUILT_IN_HANDLER = "interlock.pass"  # runs every step whose kind has no handler of the user's
COMPENSATION_PREFIX = "compensate:"  # of the step name of a compensation

MAX_MAP_PARTS = 1_000_000

# `join` and `strategy` as the share of upstream steps, or of parts, that must succeed
ALL = 1.0
ANY = 0.0

STEP_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,499}")  # 500 characters fit into an index of the database
VERSION_PATTERN = re.compile(r"[A-Za-z0-9_.+-]{1,100}")
HEADER_FIELDS = ("name", "version", "namespace", "input_schema", "timeout", "steps")
_STEP_OPTIONS = tuple(option.name for option in options_in(Scope.STEP))
_COMMON_FIELDS = ("name", "kind", "type", "after", "after_failure", "join", "config", *_STEP_OPTIONS)
_HANDLER_FIELDS = tuple(option.name for option in options_in(Scope.HANDLER_STEP))
_INHERITED_OPTIONS = tuple(option.name for option in options_in(Scope.INHERITED))
_COMPENSATION_OPTIONS = ("tries", "timeout", *_INHERITED_OPTIONS)
_COMPENSATION_FIELDS = ("compensate", *(f"compensate_{option}" for option in _COMPENSATION_OPTIONS))
STEP_FIELDS: Mapping[str, tuple[str, ...]] = {
    "plain": (*_COMMON_FIELDS, *_HANDLER_FIELDS, *_COMPENSATION_FIELDS),
    "decision": (*_COMMON_FIELDS, *_HANDLER_FIELDS, *_COMPENSATION_FIELDS, "branches"),
    MAP: (*_COMMON_FIELDS, *_HANDLER_FIELDS, "over", "over_input", "strategy"),
    "child": (*_COMMON_FIELDS, *_COMPENSATION_FIELDS, "workflow", "workflow_version", "wait", "input"),
    "sleep": (*_COMMON_FIELDS, "seconds", "until"),
    "signal": (*_COMMON_FIELDS, "signal", "timeout"),
    "approval": (*_COMMON_FIELDS, "timeout"),
}
_ALL_STEP_FIELDS = frozenset(name for names in STEP_FIELDS.values() for name in names)
# fields of which a step of the kind has exactly one
_REQUIRED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "decision": ("branches",),
    MAP: ("over", "over_input"),
    "child": ("workflow",),
    "sleep": ("seconds", "until"),
    "signal": ("signal",),
}

MAP_SOURCE_ERROR = (
    'a map goes over a list, or over whole numbers such as {"start": 0, "stop": 1000, "size": 100}, by 1 or more'
)


class GraphError(DefinitionError):
    """A workflow's definition is invalid; `path` leads to the field: ("steps", 2, "after")."""

    def __init__(
        self, message: str, *, workflow: str = "", step: str | None = None, path: tuple[Any, ...] = ()
    ) -> None:
        self.message = message
        self.path = path
        self.step = step
        places = [f"workflow {workflow}" if workflow else "workflow"]
        places += [] if step is None else [f"step {step!r}"]
        places += [path[-1]] if path and isinstance(path[-1], str) else []
        super().__init__(": ".join((*places, message)))


class Edge(NamedTuple):
    """A dependency: `downstream` waits until `upstream` has ended.

    `condition` is "success" or "failure". `branch` is true if `upstream` is a decision that lists `downstream` as one
    of its branches.
    """

    upstream: str
    downstream: str
    condition: str
    branch: bool


def edges(document: Mapping[str, Any]) -> Iterator[Edge]:
    """List the dependencies of every step, in the order of the document."""
    branches = {(step["name"], branch) for step in document["steps"] for branch in step.get("branches") or ()}
    for step in document["steps"]:
        name = step["name"]
        for upstream in step.get("after") or ():
            yield Edge(upstream, name, "success", (upstream, name) in branches)
        for upstream in step.get("after_failure") or ():
            yield Edge(upstream, name, "failure", branch=False)


def topological_order(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Order the names of steps so that each follows its dependencies; steps of a cycle are left out."""
    unresolved = {step["name"]: len(_upstreams(step)) for step in steps}
    downstreams: dict[str, list[str]] = {}
    for step in steps:
        for upstream in _upstreams(step):
            downstreams.setdefault(upstream, []).append(step["name"])
    ordered = [name for name, count in unresolved.items() if count == 0]
    for name in ordered:  # the list grows during the loop
        for downstream in downstreams.get(name, ()):
            unresolved[downstream] -= 1
            if unresolved[downstream] == 0:
                ordered.append(downstream)
    return ordered


def _upstreams(step: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(step.get("after") or ()), *(step.get("after_failure") or ()))


def required_share(rule: str | float | None) -> float:
    """Convert a `join` or a `strategy` to the share that must succeed: 1 is all, 0 is any."""
    return {"all": ALL, "any": ANY}[rule] if isinstance(rule, str) else ALL if rule is None else float(rule)


def too_many_parts_error(parts: int) -> str:
    """Describe a map whose source has more parts than a map can have."""
    return f"a map has at most {MAX_MAP_PARTS:,} parts, and this one would have {parts:,}"


def chosen_branches(branches: Sequence[str], returned: Any) -> list[str]:
    """List the branches that a decision's return value names, each once; raise PermanentError for any other value."""
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


def require_approval(answer: Any) -> Any:
    """Return the answer to an approval step if it approves; PermanentError names who rejected it, and the comment."""
    given = answer if isinstance(answer, dict) else {}
    if given.get("approved") is True:
        return answer
    by, comment = given.get("by"), given.get("comment")
    raise PermanentError("rejected" + (f" by {by}" if by else "") + (f": {comment}" if comment else ""))


class _Location:
    """The place in a document that is being checked: the header or one step."""

    def __init__(self, workflow: str, index: int | None = None, step: str | None = None) -> None:
        self._workflow = workflow
        self._index = index
        self._step = step

    def error(self, field: str, message: str) -> GraphError:
        path = (field,) if self._index is None else ("steps", self._index, field)
        return GraphError(message, workflow=self._workflow, step=self._step, path=path)

    def check(self, field: str, value: Any, check_value: Callable[[str, Any], Any]) -> None:
        try:
            check_value(field, value)
        except (ValueError, DefinitionError, InputError) as error:
            raise self.error(field, str(error)) from None


def check_definition(document: Mapping[str, Any]) -> None:
    """Raise a GraphError that names the step and the field, unless the document can be run."""
    check_header(document)
    steps = document.get("steps")
    if not isinstance(steps, list | tuple) or not steps:
        raise _Location(document["name"]).error("steps", "a workflow needs a list of one step or more")
    locations = _locate_steps(document["name"], steps)
    for step in steps:
        location = locations[step["name"]]
        _check_step(location, step)
        _check_upstreams(location, step, locations)
    _check_branches(locations, steps)
    _check_cycles(locations, steps)


def check_header(document: Any) -> None:
    """Check the fields of a document other than its steps."""
    if not isinstance(document, Mapping):
        raise GraphError(f"a definition is a mapping of {', '.join(HEADER_FIELDS)}, not {type(document).__name__}")
    location = _Location(str(document.get("name") or ""))
    for key in document:
        if key not in HEADER_FIELDS:
            known = ", ".join(HEADER_FIELDS)
            raise location.error(
                str(key), f"there is no such field{_suggestion(key, HEADER_FIELDS)}; known are {known}"
            )
    required = (("name", _check_name), ("version", _check_version), ("namespace", CHECKS["namespace"]))
    for field, check_field in required:
        location.check(field, document.get(field), check_field)
    for field, check_field in (("timeout", CHECKS["timeout"]), ("input_schema", _check_schema)):
        if document.get(field) is not None:
            location.check(field, document[field], check_field)


def check_step(workflow: str, index: int, step: dict[str, Any]) -> None:
    """Check one step by itself, without its dependencies."""
    (location,) = _locate_steps(workflow, [step], index).values()
    _check_step(location, step)


def _locate_steps(workflow: str, steps: Sequence[dict[str, Any]], first: int = 0) -> dict[str, _Location]:
    """Check the names of steps and map each to its place in the document."""
    locations: dict[str, _Location] = {}
    for index, step in enumerate(steps, first):
        if not isinstance(step, dict):
            raise GraphError(
                f"step number {index + 1} must be a mapping, not {type(step).__name__}",
                workflow=workflow,
                path=("steps", index),
            )
        name = step.get("name")
        location = _Location(workflow, index, str(name) if name else f"number {index + 1}")
        location.check("name", name, _check_name)
        if name in locations:
            raise location.error("name", "there are two steps of this name; give one of them another")
        locations[str(name)] = location
    return locations


def _check_step(location: _Location, step: dict[str, Any]) -> None:
    kind = step.get("kind", "plain")
    if kind not in STEP_KINDS:
        raise location.error("kind", f"must be one of {', '.join(STEP_KINDS)}, not {kind!r}")
    _check_fields(location, kind, step)
    if kind in KINDS_WITH_HANDLER and step.get("type") is None:
        raise location.error("type", f"a step of kind {kind} needs a handler")
    required = _REQUIRED_FIELDS.get(kind, ())
    if required and sum(step.get(field) is not None for field in required) != 1:
        not_both = "" if len(required) == 1 else ", and not both"
        raise location.error(required[0], f"a step of kind {kind} needs {' or '.join(required)}{not_both}")


def _check_fields(location: _Location, kind: str, step: dict[str, Any]) -> None:
    allowed = STEP_FIELDS[kind]
    for field, value in step.items():
        if field not in _ALL_STEP_FIELDS:
            known = ", ".join(allowed)
            raise location.error(str(field), f"there is no such field{_suggestion(field, allowed)}; known: {known}")
        if value is None:
            continue
        if field not in allowed:
            raise location.error(field, f"a step of kind {kind} has no such field; it has {', '.join(allowed)}")
        if field in _FIELD_CHECKS:
            location.check(field, value, _FIELD_CHECKS[field])
        location.check(field, value, lambda _, given: check_json(given))


def _check_upstreams(location: _Location, step: dict[str, Any], locations: Mapping[str, _Location]) -> None:
    seen: dict[str, str] = {}
    for field in ("after", "after_failure"):
        for upstream in step.get(field) or ():
            if upstream not in locations:
                raise location.error(field, f"there is no step {upstream!r}{_suggestion(upstream, locations)}")
            if upstream in seen:
                repeated = "in after and in after_failure" if seen[upstream] != field else "twice"
                raise location.error(field, f"names {upstream!r} {repeated}; a step depends on another in one way")
            seen[upstream] = field
    over = step.get("over")
    if over is not None and seen.get(over) != "after":
        raise location.error("over", f"{over!r} must stand in after too: the map goes over its result")


def _check_branches(locations: Mapping[str, _Location], steps: Sequence[dict[str, Any]]) -> None:
    upstreams = {step["name"]: step.get("after") or () for step in steps}
    for step in steps:
        location, name = locations[step["name"]], step["name"]
        for branch in step.get("branches") or ():
            if branch not in locations:
                raise location.error("branches", f"there is no step {branch!r}{_suggestion(branch, locations)}")
            if name not in upstreams[branch]:
                message = f"{branch!r} is no branch of it: it does not name {name!r} in its after"
                raise location.error("branches", message)


def _check_cycles(locations: Mapping[str, _Location], steps: Sequence[dict[str, Any]]) -> None:
    ordered = set(topological_order(steps))
    left = {step["name"]: _upstreams(step) for step in steps if step["name"] not in ordered}
    if not left:
        return
    name, walked = next(iter(left)), dict[str, None]()
    while name not in walked:
        walked[name] = None
        name = next(upstream for upstream in left[name] if upstream in left)
    names = list(walked)
    cycle = [*names[names.index(name) :], name][::-1]
    raise locations[name].error("after", f"the steps form a cycle: {' -> '.join(cycle)}")


def _suggestion(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _check_name(field: str, value: Any) -> None:
    if not isinstance(value, str) or not STEP_NAME_PATTERN.fullmatch(value):
        rule = f"a {field} consists of at most 500 letters, digits, _ . and -, and begins with a letter or _"
        raise ValueError(f"{rule}, not {value!r:.100}")


def _check_version(field: str, value: Any) -> None:
    if not isinstance(value, str) or not VERSION_PATTERN.fullmatch(value):
        rule = f"a {field} is a string of at most 100 letters, digits and . _ + -, e.g. '1' or '2.0'"
        raise ValueError(f"{rule}, not {value!r:.100}")


def _check_step_names(field: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{field} must be a list of the names of steps, not {value!r}")


def _check_branch_names(field: str, value: Any) -> None:
    _check_step_names(field, value)
    if not value or len(set(value)) != len(value):
        raise ValueError(f"{field} must name one step or more, each once, not {value!r}")


def _check_share(field: str, value: Any) -> None:
    is_ratio = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    if not is_ratio and value not in ("all", "any"):
        raise ValueError(f"{field} must be 'all', 'any' or a ratio above 0 and up to 1, not {value!r}")


def _type_check(type_: type, description: str) -> Callable[[str, Any], None]:
    def check_type(field: str, value: Any) -> None:
        if not isinstance(value, type_):
            # callers expect a ValueError from every check
            raise ValueError(f"{field} must be {description}, not {value!r}")  # noqa: TRY004

    return check_type


_check_mapping = _type_check(dict, "a mapping")


def _check_until(field: str, value: Any) -> None:
    CHECKS["unique_key"](field, value)  # a non-empty string
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        if value[0].isdigit():
            raise ValueError(f"{field} is neither a time in ISO 8601 nor a field of the input: {value!r}") from None
        return
    if time.tzinfo is None:
        raise ValueError(f"{field} needs a time zone, e.g. {value}+00:00")
    if not is_in_calendar(time):
        raise ValueError(f"{field} must be in the years {FIRST_YEAR} to {LAST_YEAR}, not {value!r}")


def _check_schema(field: str, value: Any) -> None:
    # not at the top: the schema library is slow to import, and many workflows have no schema
    from interlock.model.json_schema import check_schema  # noqa: PLC0415 - heavy, and seldom needed

    _check_mapping(field, value)
    check_json(value)
    check_schema(value)


_FIELD_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **{name: CHECKS[name] for name in (*_STEP_OPTIONS, *_HANDLER_FIELDS)},
    **{f"compensate_{name}": CHECKS[name] for name in _INHERITED_OPTIONS},
    "compensate_tries": CHECKS["max_tries"],
    **dict.fromkeys(("seconds", "compensate_timeout"), CHECKS["timeout"]),
    **dict.fromkeys(("type", "compensate", "over", "over_input", "signal"), CHECKS["unique_key"]),
    "after": _check_step_names,
    "after_failure": _check_step_names,
    "join": _check_share,
    "strategy": _check_share,
    "config": _check_mapping,
    "backoff": lambda _, value: Backoff.from_json(value),
    "branches": _check_branch_names,
    "workflow": _check_name,
    "workflow_version": _check_version,
    "wait": _type_check(bool, "true or false"),
    "input": _check_mapping,
    "until": _check_until,
}
