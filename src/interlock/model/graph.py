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
from interlock.model.conditions import parse_condition
from interlock.model.json_values import check_json
from interlock.model.options import (
    CHECKS,
    Scope,
    check_attributes,
    check_on_conflict,
    check_tags,
    integer_check,
    options_in,
)
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, is_in_calendar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAP = "map"
STEP_KINDS = ("plain", "decision", MAP, "child", "sleep", "signal", "approval")
SINGLE_TASK_KINDS = frozenset({"plain", "decision"})  # the task of the step itself runs the user's handler
KINDS_WITH_HANDLER = SINGLE_TASK_KINDS | {MAP}  # the parts of a map run its handler
SIGNAL_KINDS = ("signal", "approval")  # steps that wait for a signal; the answer to an approval is one
ENGINE_TYPE_PREFIX = "interlock."  # of the task type of steps that the orchestrator completes: interlock.sleep
COMPENSATION_PREFIX = "compensate:"  # of the step name of a compensation

MAX_MAP_PARTS = 1_000_000
MAX_REPEATS = 10_000
REPEAT_NAMES = frozenset({"output", "input", "iteration"})  # that `repeat_until` can compare
INPUT_PATH_PREFIX = "input."  # of an assignee or a key that is a path into the job's input

# the fields that name the steps on which a step depends
AFTER, ON_FAILURE, ALWAYS, RECOVERS = DEPENDENCY_FIELDS = ("after", "on_failure", "always", "recovers")
RECOVERY = "recovery"  # condition of an edge from a step that recovers another to the steps after that one

STEP_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,499}")  # 500 characters fit into an index of the database
VERSION_PATTERN = re.compile(r"[A-Za-z0-9_.+-]{1,100}")
HEADER_FIELDS = (
    "name",
    "version",
    "namespace",
    "input_schema",
    "timeout",
    "output",
    "tags",
    "attributes",
    "callback_url",
    "key",
    "on_conflict",
    "steps",
)
_STEP_OPTIONS = tuple(option.name for option in options_in(Scope.STEP))
_COMMON_FIELDS = ("name", "kind", "type", *DEPENDENCY_FIELDS, "join", "cancel_rest", "when", "config", *_STEP_OPTIONS)
_HANDLER_FIELDS = tuple(option.name for option in options_in(Scope.HANDLER_STEP))
_INHERITED_OPTIONS = tuple(option.name for option in options_in(Scope.INHERITED))
_COMPENSATION_OPTIONS = ("tries", "timeout", *_INHERITED_OPTIONS)
_COMPENSATION_FIELDS = ("compensate", *(f"compensate_{option}" for option in _COMPENSATION_OPTIONS))
STEP_FIELDS: Mapping[str, tuple[str, ...]] = {
    "plain": (*_COMMON_FIELDS, *_HANDLER_FIELDS, *_COMPENSATION_FIELDS),
    "decision": (*_COMMON_FIELDS, *_HANDLER_FIELDS, *_COMPENSATION_FIELDS, "branches"),
    MAP: (*_COMMON_FIELDS, *_HANDLER_FIELDS, "over", "over_input", "strategy"),
    "child": (
        *_COMMON_FIELDS,
        *_COMPENSATION_FIELDS,
        "workflow",
        "workflow_version",
        "wait",
        "input",
        "repeat_until",
        "max_repeats",
    ),
    "sleep": (*_COMMON_FIELDS, "seconds", "until"),
    "signal": (*_COMMON_FIELDS, "signal", "timeout", "assignee", "payload_schema"),
    "approval": (*_COMMON_FIELDS, "timeout", "assignee"),
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
        self,
        message: str,
        *,
        workflow: str = "",
        step: str | None = None,
        path: tuple[Any, ...] = (),
        declared_at: str | None = None,
    ) -> None:
        self.message = message
        self.path = path
        self.step = step
        self.workflow = workflow
        places = [f"workflow {workflow}" if workflow else "workflow"]
        places += [] if step is None else [f"step {step!r}"]
        places += [path[-1]] if path and isinstance(path[-1], str) else []
        declared = "" if declared_at is None else f" (declared at {declared_at})"
        super().__init__(": ".join((*places, message)) + declared)


class Edge(NamedTuple):
    """A dependency: `downstream` waits until `upstream` has ended.

    `condition` is the field that declares it, or RECOVERY: a step after a failed step also waits for the steps that
    recover that one. `branch` is true if `upstream` is a decision that lists `downstream` as one of its branches.
    """

    upstream: str
    downstream: str
    condition: str
    branch: bool


def recovering_steps(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Map each step to the steps that recover it, in the order of the definition."""
    found: dict[str, list[str]] = {}
    for step in document["steps"]:
        for failed in step.get(RECOVERS) or ():
            found.setdefault(failed, []).append(step["name"])
    return found


def edges(document: Mapping[str, Any]) -> Iterator[Edge]:
    """List the dependencies of every step, in the order of the document."""
    branches = {(step["name"], branch) for step in document["steps"] for branch in step.get("branches") or ()}
    recovering = recovering_steps(document)
    for step in document["steps"]:
        name = step["name"]
        declared = dependencies(step)
        for upstream, field in declared:
            yield Edge(upstream, name, field, field == AFTER and (upstream, name) in branches)
        for upstream in _recoverers(recovering, step, {name, *(upstream for upstream, _ in declared)}):
            yield Edge(upstream, name, RECOVERY, branch=False)


def dependencies(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the steps on which a step depends, each with the field that names it."""
    return [(upstream, field) for field in DEPENDENCY_FIELDS for upstream in step.get(field) or ()]


def _recoverers(recovering: Mapping[str, list[str]], step: Mapping[str, Any], seen: set[str]) -> Iterator[str]:
    """List the steps that recover the dependencies of a step, or recover such steps, without those that are seen."""
    left = list(step.get(AFTER) or ()) if recovering else []
    while left:
        for recoverer in recovering.get(left.pop(), ()):
            if recoverer not in seen:
                seen.add(recoverer)
                left.append(recoverer)
                yield recoverer


def topological_order(document: Mapping[str, Any]) -> list[str]:
    """Order the names of steps so that each follows its dependencies; steps of a cycle are left out."""
    unresolved = {step["name"]: 0 for step in document["steps"]}
    downstreams: dict[str, list[str]] = {}
    for edge in edges(document):
        unresolved[edge.downstream] += 1
        downstreams.setdefault(edge.upstream, []).append(edge.downstream)
    ordered = [name for name, count in unresolved.items() if count == 0]
    for name in ordered:  # the list grows during the loop
        for downstream in downstreams.get(name, ()):
            unresolved[downstream] -= 1
            if unresolved[downstream] == 0:
                ordered.append(downstream)
    return ordered


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


def signal_name(step: Mapping[str, Any]) -> str:
    """Return the name of the signal that a signal or approval step waits for; an approval has that of its step."""
    return str(step["name"] if step["kind"] == "approval" else step["signal"])


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
        _check_join(location, step)
        _check_condition(location, step)
    _check_branches(locations, steps)
    _check_recoveries(locations, steps)
    _check_signals(locations, steps)
    _check_cycles(locations, document)
    for _, step in output_steps(document.get("output")):
        if step not in locations:
            message = f"there is no step {step!r}{suggestion(step, locations)}"
            raise _Location(document["name"]).error("output", message)


def output_steps(output: str | Mapping[str, str] | None) -> list[tuple[str | None, str]]:
    """List the names and steps of a declared `output`; a step whose result is the output itself has no name."""
    if output is None:
        return []
    return [(None, output)] if isinstance(output, str) else list(output.items())


def check_header(document: Any) -> None:
    """Check the fields of a document other than its steps."""
    if not isinstance(document, Mapping):
        raise GraphError(f"a definition is a mapping of {', '.join(HEADER_FIELDS)}, not {type(document).__name__}")
    location = _Location(str(document.get("name") or ""))
    for key in document:
        if key not in HEADER_FIELDS:
            known = ", ".join(HEADER_FIELDS)
            raise location.error(str(key), f"there is no such field{suggestion(key, HEADER_FIELDS)}; known are {known}")
    required = (("name", _check_name), ("version", _check_version), ("namespace", CHECKS["namespace"]))
    for field, check_field in required:
        location.check(field, document.get(field), check_field)
    for field, check_field in _OPTIONAL_HEADER_CHECKS.items():
        if document.get(field) is not None:
            location.check(field, document[field], check_field)
    if document.get("on_conflict") is not None and document.get("key") is None:
        raise location.error("on_conflict", "it needs a key")


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
            raise location.error(str(field), f"there is no such field{suggestion(field, allowed)}; known: {known}")
        if value is None:
            continue
        if field not in allowed:
            raise location.error(field, f"a step of kind {kind} has no such field; it has {', '.join(allowed)}")
        if field in _FIELD_CHECKS:
            location.check(field, value, _FIELD_CHECKS[field])
        location.check(field, value, lambda _, given: check_json(given))


def _check_upstreams(location: _Location, step: dict[str, Any], locations: Mapping[str, _Location]) -> None:
    seen: dict[str, str] = {}
    for field in DEPENDENCY_FIELDS:
        for upstream in step.get(field) or ():
            if upstream not in locations:
                raise location.error(field, f"there is no step {upstream!r}{suggestion(upstream, locations)}")
            if upstream in seen:
                repeated = "twice" if seen[upstream] == field else f"in {seen[upstream]} and in {field}"
                hint = "; always=[...] runs after success and after failure" if seen[upstream] != field else ""
                raise location.error(field, f"names {upstream!r} {repeated}; a step depends on another once{hint}")
            seen[upstream] = field
    over = step.get("over")
    if over is not None and seen.get(over) != AFTER:
        raise location.error("over", f"{over!r} must stand in after too: the map goes over its result")


def _check_join(location: _Location, step: dict[str, Any]) -> None:
    join, upstreams = step.get("join"), dependencies(step)
    if not upstreams and join not in {None, "all"}:
        raise location.error("join", "the step has no dependencies")
    if isinstance(join, int) and join > len(upstreams):
        raise location.error("join", f"needs {join} dependencies, and the step has {len(upstreams)}")
    if step.get("cancel_rest") and join in {None, "all"}:
        raise location.error("cancel_rest", "needs a join that can be met early: 'any', a number or a ratio")


def _check_condition(location: _Location, step: dict[str, Any]) -> None:
    if step.get("when") is not None:
        known = {"input", *(step.get(AFTER) or ())}
        unknown = sorted(parse_condition(step["when"]).names - known)
        if unknown:
            hint = suggestion(unknown[0], known)
            raise location.error("when", f"{unknown[0]!r} is neither 'input' nor a step in its after{hint}")
    if (step.get("repeat_until") is None) is not (step.get("max_repeats") is None):
        raise location.error("repeat_until", "needs max_repeats beside it, and max_repeats needs repeat_until")
    if step.get("repeat_until") is not None:
        unknown = sorted(parse_condition(step["repeat_until"]).names - REPEAT_NAMES)
        if unknown:
            known_names = ", ".join(sorted(REPEAT_NAMES))
            raise location.error("repeat_until", f"{unknown[0]!r} is none of {known_names}")
        if step.get("wait") is False:
            raise location.error("wait", "a step that repeats its child job waits for it")


def _check_branches(locations: Mapping[str, _Location], steps: Sequence[dict[str, Any]]) -> None:
    upstreams = {step["name"]: step.get("after") or () for step in steps}
    for step in steps:
        location, name = locations[step["name"]], step["name"]
        for branch in step.get("branches") or ():
            if branch not in locations:
                raise location.error("branches", f"there is no step {branch!r}{suggestion(branch, locations)}")
            if name not in upstreams[branch]:
                message = f"{branch!r} is no branch of it: it does not name {name!r} in its after"
                raise location.error("branches", message)


def _check_recoveries(locations: Mapping[str, _Location], steps: Sequence[dict[str, Any]]) -> None:
    decisions = {step["name"] for step in steps if step.get("kind") == "decision"}
    recovering = recovering_steps({"steps": steps})
    for step in steps:
        for failed in step.get(RECOVERS) or ():
            if failed in decisions:
                message = f"{failed!r} is a decision, and another step cannot choose its branches for it"
                raise locations[step["name"]].error(RECOVERS, message)
        if step["name"] in _recoverers(recovering, step, set()):
            message = f"{step['name']!r} would wait for itself: it recovers a step that it comes after, or its recovery"
            raise locations[step["name"]].error(RECOVERS, message)


def _check_signals(locations: Mapping[str, _Location], steps: Sequence[dict[str, Any]]) -> None:
    """Check that a signal name has one payload, and is not the name of an approval, which is answered once."""
    waiting = [step for step in steps if step.get("kind") in SIGNAL_KINDS]
    first: dict[str, dict[str, Any]] = {}
    for step in waiting:
        known = first.setdefault(signal_name(step), step)
        if {known["kind"], step["kind"]} == set(SIGNAL_KINDS):
            taking, approval = (step, known) if step["kind"] == "signal" else (known, step)
            message = f"{signal_name(step)!r} is the name of the approval step {approval['name']!r}; choose another"
            raise locations[taking["name"]].error("signal", message)
        if step.get("payload_schema") != known.get("payload_schema"):
            message = f"step {known['name']!r} waits for the same signal with another payload; use one type for both"
            raise locations[step["name"]].error("payload_schema", message)


def _check_cycles(locations: Mapping[str, _Location], document: Mapping[str, Any]) -> None:
    ordered = set(topological_order(document))
    left: dict[str, list[str]] = {}
    for edge in edges(document):
        if edge.downstream not in ordered:
            left.setdefault(edge.downstream, []).append(edge.upstream)
    if not left:
        return
    name, walked = next(iter(left)), dict[str, None]()
    while name not in walked:
        walked[name] = None
        name = next(upstream for upstream in left[name] if upstream in left)
    names = list(walked)
    cycle = [*names[names.index(name) :], name][::-1]
    raise locations[name].error(AFTER, f"the steps form a cycle: {' -> '.join(cycle)}")


def suggestion(name: Any, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the known name that is close to it, if there is one."""
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


def _check_join_rule(field: str, value: Any) -> None:
    if isinstance(value, str):
        is_valid = value in {"all", "any"}
    elif isinstance(value, float):
        is_valid = 0 < value <= 1
    else:
        is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_valid:
        rule = "'all', 'any', a whole number of dependencies from 1, or a ratio above 0 and up to 1"
        raise ValueError(f"{field} must be {rule}, not {value!r}")


def _check_when(field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string such as 'price.total > 100', not {value!r}")  # noqa: TRY004 - as others
    parse_condition(value)


def _type_check(type_: type, description: str) -> Callable[[str, Any], None]:
    def check_type(field: str, value: Any) -> None:
        if not isinstance(value, type_):
            # callers expect a ValueError from every check
            raise ValueError(f"{field} must be {description}, not {value!r}")  # noqa: TRY004

    return check_type


_check_mapping = _type_check(dict, "a mapping")


def _check_sleep(field: str, value: Any) -> None:
    if not (isinstance(value, int | float) and not isinstance(value, bool) and value == 0):
        CHECKS["timeout"](field, value)


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


def _check_assignee(field: str, value: Any) -> None:
    CHECKS["unique_key"](field, value)  # a non-empty string
    if value.startswith(INPUT_PATH_PREFIX) and "" in value.split("."):
        raise ValueError(f"{field} must be a name or a path into the input such as 'input.manager', not {value!r}")


def _check_schema(field: str, value: Any) -> None:
    # not at the top: the schema library is slow to import, and many workflows have no schema
    from interlock.model.json_schema import check_schema  # noqa: PLC0415 - heavy, and seldom needed

    _check_mapping(field, value)
    check_json(value)
    check_schema(value)


def _check_output(field: str, value: Any) -> None:
    names = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{field} must be the name of a step, or a mapping of names to steps, not {value!r}")
    check_json(value)


_OPTIONAL_HEADER_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "timeout": CHECKS["timeout"],
    "input_schema": _check_schema,
    "output": _check_output,
    "tags": check_tags,
    "attributes": check_attributes,
    "callback_url": CHECKS["callback_url"],
    "key": CHECKS["unique_key"],
    "on_conflict": check_on_conflict,
}

_FIELD_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **{name: CHECKS[name] for name in (*_STEP_OPTIONS, *_HANDLER_FIELDS)},
    **{f"compensate_{name}": CHECKS[name] for name in _INHERITED_OPTIONS},
    "compensate_tries": CHECKS["max_tries"],
    "compensate_timeout": CHECKS["timeout"],
    "seconds": _check_sleep,
    **dict.fromkeys(("type", "compensate", "over", "over_input", "signal"), CHECKS["unique_key"]),
    **dict.fromkeys(DEPENDENCY_FIELDS, _check_step_names),
    "join": _check_join_rule,
    "cancel_rest": _type_check(bool, "true or false"),
    "when": _check_when,
    "repeat_until": _check_when,
    "max_repeats": integer_check(1, MAX_REPEATS),
    "strategy": _check_share,
    "config": _check_mapping,
    "backoff": lambda _, value: Backoff.from_json(value),
    "branches": _check_branch_names,
    "workflow": _check_name,
    "workflow_version": _check_version,
    "wait": _type_check(bool, "true or false"),
    "input": _check_mapping,
    "until": _check_until,
    "assignee": _check_assignee,
    "payload_schema": _check_schema,
}
