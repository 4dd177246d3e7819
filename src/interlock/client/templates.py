"""Loads workflows from YAML templates, with the same steps and options as in Python.

The fields of the templates of tasker-core are known too: those that have a meaning here are converted, and each of the
others is reported by a TemplateWarning.

Invariant: a template is declared by the same calls as a workflow in Python; every error names the file, the line and
the field.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from interlock.client.template_yaml import NULL_TAG, TemplateError, node_line, node_value, read_documents
from interlock.errors import DefinitionError, InputError
from interlock.model.backoff import Backoff
from interlock.model.graph import (
    AFTER,
    DEPENDENCY_FIELDS,
    HEADER_FIELDS,
    KINDS_WITH_HANDLER,
    MAP,
    STEP_FIELDS,
    STEP_KINDS,
    GraphError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from interlock.client.registry import Definitions
    from interlock.client.step_decorators import Handler
    from interlock.client.workflow import Workflow

    Handlers = Mapping[str, Handler] | Callable[[str], Handler | None]

SUFFIXES = (".yaml", ".yml")
ALL_STEPS = "ALL"  # in an environment: the override is for every step
DEFAULT_METHOD = "call"
# names in templates that differ from those in the definition document
HEAD_NAMES = {"namespace_name": "namespace", "timeout_seconds": "timeout"}
STEP_NAMES = {
    "dependencies": AFTER,
    "depends_on": AFTER,
    "timeout_seconds": "timeout",
    "type": "kind",
    "step_type": "kind",
    "handler": "type",
}
BATCHABLE, BATCH_WORKER, DEFERRED = "batchable", "batch_worker", "deferred_convergence"
KIND_NAMES = {
    "standard": "plain",
    "decision_point": "decision",
    "deferred": "plain",
    DEFERRED: "plain",
    BATCHABLE: "plain",
    BATCH_WORKER: MAP,
}
FAILURE_STRATEGIES = {"fail_fast": "all", "isolate": "all", "continue_on_failure": "any"}
RETRY_NAMES = {"limit": "max_tries", "max_attempts": "max_tries", "backoff": "kind"}
# fields of `retry` that are delays: the field of the backoff, and how many of them are a second
DELAYS = {
    "base": ("base", 1),
    "cap": ("cap", 1),
    "initial_delay": ("base", 1),
    "max_delay": ("cap", 1),
    "backoff_base_ms": ("base", 1000),
    "max_backoff_ms": ("cap", 1000),
}
# fields without an effect here, with what takes their place; empty values are not reported
HEAD_WITHOUT_EFFECT = {
    "system_dependencies": "Interlock keeps no record of external systems",
    "domain_events": "a callback_url sends a webhook when a task has ended",
    "task_handler": "only steps have handlers; check the input with input_schema",
    "loaded_from": "the path of the file is not stored",
}
STEP_WITHOUT_EFFECT = {
    "system_dependency": "Interlock keeps no record of external systems",
    "publishes_events": "a callback_url sends a webhook when the step has ended",
    "result_schema": "a result is checked against the return annotation of its handler",
    "lifecycle": "the tries of a step are set with retry, its duration with timeout_seconds",
}
ENVIRONMENT_WITHOUT_EFFECT = {"task_handler": HEAD_WITHOUT_EFFECT["task_handler"]}
LIFECYCLE_WITHOUT_EFFECT = {
    "max_waiting_for_dependencies_minutes": "a step may wait until the timeout of the job",
    "max_waiting_for_retry_minutes": "max_backoff_ms limits the delay of a retry",
    "max_steps_in_process_minutes": "set timeout_seconds of the steps",
    "staleness_action": "a job that exceeds its timeout is canceled",
    "auto_fail_on_timeout": "a job that exceeds its timeout is canceled",
    "auto_dlq_on_timeout": "a job that exceeds its timeout is canceled",
}
_NOTES = ("description", "metadata")  # for readers of the file
_IN_RETRY = ("max_tries", "backoff")
HEAD = (*HEADER_FIELDS, "lifecycle", "environments", *_NOTES, *HEAD_WITHOUT_EFFECT)
_STEP_FIELDS = {name for names in STEP_FIELDS.values() for name in names}
STEP = (*sorted(_STEP_FIELDS - set(_IN_RETRY)), "retry", "batch_config", *_NOTES, *STEP_WITHOUT_EFFECT)
RETRY = ("max_tries", "retryable", "kind", "jitter", *DELAYS)
HANDLER = ("callable", "method", "initialization", "resolver")
BATCH = ("batch_size", "parallelism", "cursor_field", "worker_template", "failure_strategy")
OVERRIDE = ("name", "handler", "retry", "timeout")
_STEP_LISTS = (*DEPENDENCY_FIELDS, "branches")


class TemplateWarning(UserWarning):
    """A field of a template has no effect here; the warning has the file and the line."""


class TemplateCheck(NamedTuple):
    """The findings of `check_templates` in templates that can be loaded."""

    workflows: list[Workflow]
    handlers: list[str]  # all that the templates name, in the order of their first use
    warnings: list[str]


def load_templates(
    app: Definitions, path: str | Path, *, environment: str | None = None, handlers: Handlers | None = None
) -> list[Workflow]:
    """Declare the workflows of a file, or of all templates in a directory, on an app.

    `environment` names the block of `environments` to apply. `handlers` gives the task or function for a name of a
    handler: a mapping, or a function that returns None for a name that it does not know.
    """
    try:
        place = Path(path)
    except TypeError:
        raise DefinitionError(f"templates need the path of a file or a directory, got {path!r}") from None
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES) if place.is_dir() else [place]
    if not files:
        raise DefinitionError(f"there are no templates in {place}; their names end in {' or '.join(SUFFIXES)}")
    find = handlers.get if isinstance(handlers, Mapping) else handlers or (lambda _: None)
    return [workflow for file in files for workflow in _load_file(app, file, environment, find)]


def check_templates(path: str | Path, *, environment: str | None = None) -> TemplateCheck:
    """Check templates without their handlers: whether they can be loaded, and what of them has no effect."""
    from interlock.client.app import Interlock  # noqa: PLC0415 - the app imports this module

    names: dict[str, None] = {}

    def stand_in(name: str) -> Handler:
        names[name] = None
        return _stand_in

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TemplateWarning)
        workflows = load_templates(Interlock(), path, environment=environment, handlers=stand_in)
    own = [each for each in caught if issubclass(each.category, TemplateWarning)]
    told = [f"{each.filename}, line {each.lineno}: {each.message}" for each in own]
    return TemplateCheck(workflows, list(names), told)


def _stand_in() -> Any:
    """Stand in for a handler while a template is checked."""


def _load_file(
    app: Definitions, file: Path, environment: str | None, find: Callable[[str], Handler | None]
) -> Iterator[Workflow]:
    is_empty = True
    for node in read_documents(file):
        is_empty = False
        yield _Template(app, file, node, environment, find).workflow()
    if is_empty:
        raise DefinitionError(f"template {file} is empty; it needs a workflow with a name and steps")


class _Fields:
    """The fields of one mapping, each with its place in the file; a field without a value is left out."""

    def __init__(
        self, file: Path, node: yaml.Node, place: str, known: Iterable[str], names: Mapping[str, str] | None = None
    ) -> None:
        self._file = file
        self._node = node
        self.place = place
        self.nodes: dict[str, yaml.Node] = {}
        self.keys: dict[str, yaml.Node] = {}
        names = names or {}
        if not isinstance(node, yaml.MappingNode):
            raise TemplateError(file, node_line(node), place, "expected a mapping of fields")
        known = tuple(known)
        for key, value in node.value:
            field = names.get(key.value, key.value)
            if key.value not in names and key.value not in known:
                problem = f"unknown field: {key.value}; known are {', '.join(sorted({*names, *known}))}"
                raise TemplateError(file, node_line(key), place, problem)
            if field in self.nodes:
                raise TemplateError(file, node_line(key), place, f"the field {key.value} is given twice")
            if value.tag != NULL_TAG:
                self.nodes[field], self.keys[field] = value, key

    def value(self, field: str, default: Any = None) -> Any:
        return node_value(self.nodes[field]) if field in self.nodes else default

    def values(self) -> dict[str, Any]:
        return {field: node_value(node) for field, node in self.nodes.items()}

    def text(self, field: str) -> str | None:
        value = self.value(field)
        if value is not None and not isinstance(value, str):
            raise self.refuse(field, f"must be a string, not {value!r:.100}")
        return value

    def number(self, field: str) -> float | None:
        value = self.value(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.refuse(field, f"must be a number, not {value!r:.100}")
        return value

    def mapping(self, field: str) -> dict[str, Any]:
        value = self.value(field, {})
        if not isinstance(value, dict):
            raise self.refuse(field, f"must be a mapping, not {value!r:.100}")
        return value

    def items(self, field: str) -> list[yaml.Node]:
        """Return the nodes of a list."""
        node = self.nodes.get(field)
        if node is not None and not isinstance(node, yaml.SequenceNode):
            raise self.refuse(field, f"must be a list, not {node_value(node)!r:.100}")
        return [] if node is None else list(node.value)

    def within(self, field: str, known: Iterable[str], names: Mapping[str, str] | None = None) -> _Fields | None:
        """Return the fields of the mapping in a field."""
        if field not in self.nodes:
            return None
        return _Fields(self._file, self.nodes[field], self._place(field), known, names)

    def refuse(self, field: str, message: str) -> TemplateError:
        field = "retry" if field in _IN_RETRY else field
        return TemplateError(self._file, self.line(field), self._place(field), message)

    def line(self, field: str) -> int:
        return node_line(self.keys.get(field, self._node))

    def _place(self, field: str) -> str:
        written = self.keys[field].value if field in self.keys else field
        return ", ".join(filter(None, (self.place, written)))


class _Step(NamedTuple):
    """A step as the template writes it: its fields, its type and its options."""

    fields: _Fields
    written_type: str
    options: dict[str, Any]
    handler: Any
    batch: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.options["name"]
        return name

    def depends_on(self, step: _Step) -> bool:
        return step.name in (self.options.get(AFTER) or ())


class _Template:
    """One YAML document of a file."""

    def __init__(
        self,
        app: Definitions,
        file: Path,
        node: yaml.Node,
        environment: str | None,
        find: Callable[[str], Handler | None],
    ) -> None:
        self._app = app
        self._file = file
        self._environment = environment
        self._find = find
        self._head = _Fields(file, node, "", HEAD, HEAD_NAMES)
        self._without_effect: dict[tuple[str, str], tuple[int, list[str]]] = {}  # by field and reason: line and steps

    def workflow(self) -> Workflow:
        head = self._options()
        steps = self._steps()
        try:
            made = self._app.workflow(**head)
            for step in steps:
                self._add(made, step)
            made.document  # noqa: B018 - it is checked as a whole
        except GraphError as error:
            raise self._located(error, steps) from None
        except TemplateError:
            raise
        except DefinitionError as error:
            raise self._head.refuse("name", str(error)) from None
        self._warn()
        return made

    def _located(self, error: GraphError, steps: list[_Step]) -> TemplateError:
        is_in_step = error.path[:1] == ("steps",) and len(error.path) > 1
        fields: _Fields = steps[error.path[1]].fields if is_in_step else self._head
        return fields.refuse(str(error.path[-1]) if error.path else "name", error.message)

    def _add(self, workflow: Workflow, step: _Step) -> None:
        try:
            workflow.add(handler=step.handler, **step.options)
        except GraphError:
            raise
        except DefinitionError as error:
            raise step.fields.refuse("type", str(error)) from None

    # --- The head ---

    def _options(self) -> dict[str, Any]:
        head = self._head
        self._note_without_effect(head, HEAD_WITHOUT_EFFECT)
        options = {field: head.value(field) for field in HEADER_FIELDS if field != "steps" and field in head.nodes}
        options["name"] = head.text("name")
        version = head.nodes.get("version")
        if isinstance(version, yaml.ScalarNode):
            options["version"] = version.value  # as it is written: 1.10 is not 1.1
        timeout = self._max_duration()
        if timeout is not None:
            if "timeout" in options:
                raise head.refuse("lifecycle", f"max_duration_minutes and {head.keys['timeout'].value} are one field")
            options["timeout"] = timeout
        return options

    def _max_duration(self) -> float | None:
        """Return the timeout of the job that `lifecycle` sets, in seconds."""
        lifecycle = self._head.within("lifecycle", ("max_duration_minutes", *LIFECYCLE_WITHOUT_EFFECT))
        if lifecycle is None:
            return None
        self._note_without_effect(lifecycle, LIFECYCLE_WITHOUT_EFFECT, "lifecycle.")
        minutes = lifecycle.number("max_duration_minutes")
        if minutes is not None and lifecycle.value("staleness_action") == "none":
            self._note("lifecycle.max_duration_minutes", "staleness_action is none", lifecycle, "max_duration_minutes")
            return None
        return None if minutes is None else minutes * 60

    # --- The steps ---

    def _steps(self) -> list[_Step]:
        head = self._head
        if not isinstance(head.nodes.get("steps"), yaml.SequenceNode):
            raise head.refuse("steps", "a template needs a list of steps")
        nodes = head.items("steps")
        fields = [_Fields(self._file, node, f"steps[{at}]", STEP, STEP_NAMES) for at, node in enumerate(nodes)]
        for each in fields:
            name = each.text("name")
            if name is None:
                raise each.refuse("name", "a step needs a name")
            each.place = f"step {name!r:.100}"
        overrides = self._overrides([each.value("name") for each in fields])
        steps = [self._step(each, overrides) for each in fields]
        for step in steps:
            if step.written_type == BATCHABLE:
                self._check_batchable(step, steps)
            elif step.written_type == BATCH_WORKER:
                self._set_batch_source(step, steps)
            elif step.options["kind"] == "decision" and step.options.get("branches") is None:
                step.options["branches"] = self._branches(step, steps)
        return steps

    def _step(self, fields: _Fields, overrides: list[_Fields]) -> _Step:
        self._note_without_effect(fields, STEP_WITHOUT_EFFECT)
        config: dict[str, Any] = {}
        for override in overrides:
            if override.value("name") in {ALL_STEPS, fields.value("name")}:
                config |= self._override(fields, override)
        written = fields.text("kind") or "plain"
        handler, initialization = self._handler(fields)
        kind = KIND_NAMES.get(written, written)
        if handler is not None and kind in STEP_KINDS and kind not in KINDS_WITH_HANDLER:
            raise fields.refuse("type", f"a step of type {kind} has no handler of its own")
        batch = self._batch(fields, written)
        config = {**({"batch_config": batch} if batch else {}), **initialization, **fields.mapping("config"), **config}
        options = {
            **self._own_options(fields),
            **self._tries(fields),
            "kind": kind,
            "compensate": self._found(fields, "compensate", fields.value("compensate")),
            "config": config or None,
        }
        return _Step(fields, written, options, handler, batch)

    def _own_options(self, fields: _Fields) -> dict[str, Any]:
        """Return the options that need no conversion."""
        skipped = {"type", "retry", "batch_config", *_NOTES, *STEP_WITHOUT_EFFECT}
        options = {field: fields.value(field) for field in fields.nodes if field not in skipped}
        for field in _STEP_LISTS:
            if isinstance(options.get(field), dict):
                raise fields.refuse(field, f"must be a list of the names of steps, not {options[field]!r:.100}")
        if isinstance(options.get(AFTER), str):
            options[AFTER] = [options[AFTER]]
        return options

    def _branches(self, decision: _Step, steps: list[_Step]) -> list[str]:
        """Return the branches of a decision that declares none: the steps after it, other than those that join them."""
        after = [step for step in steps if step.depends_on(decision)]
        branches = [step for step in after if step.written_type not in {DEFERRED, "deferred"}] or after
        if not branches:
            raise decision.fields.refuse("kind", "a decision needs branches, and no step depends on it")
        return [step.name for step in branches]

    def _handler(self, fields: _Fields) -> tuple[Any, dict[str, Any]]:
        """Return the handler, and its `initialization`, which becomes `config`."""
        if not isinstance(fields.nodes.get("type"), yaml.MappingNode):
            return self._found(fields, "type", fields.value("type")), {}
        said = fields.within("type", HANDLER)
        assert said is not None  # noqa: S101 - it is a mapping
        name, method = said.text("callable"), said.text("method")
        if name is None:
            raise said.refuse("callable", "a handler needs the name of a task or of a function")
        if "resolver" in said.nodes:
            self._note("handler.resolver", "handlers are found by name", said, "resolver", fields.value("name"))
        if method not in {None, DEFAULT_METHOD}:
            name = f"{name}.{method}"
        return self._found(said, "callable", name), said.mapping("initialization")

    def _found(self, fields: _Fields, field: str, name: Any) -> Any:
        """Find the handler that a template names: given by the caller, a task of the app, or a function to import."""
        if name is None:
            return None
        if not isinstance(name, str):
            raise fields.refuse(field, f"a handler must be the name of a task or module:function, got {name!r:.100}")
        found = self._find(name)
        if found is not None and not isinstance(found, str):
            return found
        name = name if found is None else found
        if name in self._app.tasks:
            return name
        given = f"give it with load_templates(..., handlers={{{name!r}: ...}})"
        if "::" in name:
            raise fields.refuse(field, f"the app has no task {name!r}, which cannot be imported; {given}")
        if not any(mark in name for mark in ":."):
            known = ", ".join(sorted(task for task in self._app.tasks if "/" not in task))
            problem = f"the app has no task {name!r}; it has {known}; a function is module:name"
            raise fields.refuse(field, problem)
        try:
            return _imported(name)
        except LookupError as error:
            raise fields.refuse(field, f"{error.args[0]}, and the app has no such task; {given}") from None

    def _tries(self, fields: _Fields) -> dict[str, Any]:
        retry = fields.within("retry", RETRY, RETRY_NAMES)
        if retry is None:
            return {}
        retryable = retry.value("retryable", default=True)
        if not isinstance(retryable, bool):
            raise retry.refuse("retryable", f"must be true or false, not {retryable!r:.100}")
        tries = retry.value("max_tries") if retryable else 1
        if tries == 0 and retry.keys["max_tries"].value != "max_tries":
            name = f"retry.{retry.keys['max_tries'].value}: 0"
            self._note(name, "the first try is always made", retry, "max_tries", fields.value("name"))
            tries = 1
        policy: dict[str, Any] = {}
        policy |= {field: retry.value(field) for field in ("kind", "jitter") if field in retry.nodes}
        for written, (field, per_second) in DELAYS.items():
            if written in retry.nodes:
                if field in policy:
                    raise retry.refuse(written, f"the field {field} is given twice")
                policy[field] = (retry.number(written) or 0) / per_second
        try:
            backoff = Backoff.from_json(policy) if policy else None
        except InputError as error:
            raise fields.refuse("backoff", str(error)) from None
        return {"max_tries": tries, "backoff": backoff}

    # --- Batches: a batchable step returns the ranges, and a batch worker is a map over them ---

    def _batch(self, fields: _Fields, written_type: str) -> dict[str, Any]:
        batch = fields.within("batch_config", BATCH)
        if batch is None:
            return {}
        if written_type not in {BATCHABLE, BATCH_WORKER}:
            raise fields.refuse("batch_config", f"only steps of type {BATCHABLE} and {BATCH_WORKER} have this field")
        strategy = batch.text("failure_strategy")
        if strategy is not None and strategy not in FAILURE_STRATEGIES:
            known = ", ".join(FAILURE_STRATEGIES)
            raise batch.refuse("failure_strategy", f"must be one of {known}, not {strategy!r:.100}")
        if strategy == "isolate":
            reason = "a failed part fails the job, which can be retried"
            name = "batch_config.failure_strategy: isolate"
            self._note(name, reason, batch, "failure_strategy", fields.value("name"))
        if "parallelism" in batch.nodes:
            reason = "a limit_key with app.limit(key, max_running=...) limits how many parts run at once"
            self._note("batch_config.parallelism", reason, batch, "parallelism", fields.value("name"))
        batch.text("worker_template")
        return batch.values()

    def _check_batchable(self, step: _Step, steps: list[_Step]) -> None:
        workers = [worker for worker in steps if worker.written_type == BATCH_WORKER and worker.depends_on(step)]
        template = step.batch.get("worker_template")
        if template is not None and template not in {worker.name for worker in workers}:
            problem = f"worker_template names {template!r:.100}, which is no {BATCH_WORKER} that depends on this step"
            raise step.fields.refuse("batch_config", problem)
        if not workers:
            raise step.fields.refuse("kind", f"no step of type {BATCH_WORKER} depends on this step")

    def _set_batch_source(self, worker: _Step, steps: list[_Step]) -> None:
        """Make a batch worker a map over the result of its batchable step."""
        template = worker.batch.get("worker_template", worker.name)
        if template != worker.name:
            problem = f"worker_template must be {worker.name!r}, the name of this step, not {template!r:.100}"
            raise worker.fields.refuse("batch_config", problem)
        batchable = [step for step in steps if step.written_type == BATCHABLE and worker.depends_on(step)]
        if len(batchable) != 1:
            named = f", not {', '.join(step.name for step in batchable)}" if batchable else ""
            problem = f"a step of type {BATCH_WORKER} depends on exactly one step of type {BATCHABLE}{named}"
            raise worker.fields.refuse("kind", problem)
        (source,) = batchable
        worker.options["over"] = source.name
        strategy = worker.batch.get("failure_strategy", source.batch.get("failure_strategy"))
        if strategy is not None:
            if "strategy" in worker.options:
                raise worker.fields.refuse("strategy", "give strategy or failure_strategy, not both")
            worker.options["strategy"] = FAILURE_STRATEGIES[strategy]

    # --- Environments ---

    def _overrides(self, steps: list[str]) -> list[_Fields]:
        """Check the overrides of all environments; return those of the chosen one."""
        chosen: list[_Fields] = []
        environments = self._head.nodes.get("environments")
        if environments is None:
            return chosen
        if not isinstance(environments, yaml.MappingNode):
            raise self._head.refuse("environments", "must be a mapping of environments to their overrides")
        for key, node in environments.value:
            place = f"environment {key.value!r:.100}"
            if node.tag == NULL_TAG:
                continue
            block = _Fields(self._file, node, place, ("steps", *ENVIRONMENT_WITHOUT_EFFECT))
            if key.value == self._environment:
                self._note_without_effect(block, ENVIRONMENT_WITHOUT_EFFECT, f"environments.{key.value}.")
            for item in block.items("steps"):
                override = _Fields(self._file, item, place, OVERRIDE, {"timeout_seconds": "timeout"})
                name = override.text("name")
                if name != ALL_STEPS and name not in steps:
                    raise override.refuse("name", f"there is no step {name!r:.100}; {ALL_STEPS} stands for all steps")
                override.place = f"{place}, step {name!r:.100}"
                override.within("handler", ("initialization",))
                if key.value == self._environment:
                    chosen.append(override)
        return chosen

    def _override(self, fields: _Fields, override: _Fields) -> dict[str, Any]:
        """Replace `retry` and `timeout` of a step; return what is added to its config."""
        for field in ("retry", "timeout"):
            if field in override.nodes:
                fields.nodes[field], fields.keys[field] = override.nodes[field], override.keys[field]
        handler = override.within("handler", ("initialization",))
        return {} if handler is None else handler.mapping("initialization")

    # --- Fields without an effect ---

    def _note_without_effect(self, fields: _Fields, reasons: Mapping[str, str], prefix: str = "") -> None:
        for field, reason in reasons.items():
            if _says_something(fields.value(field)):
                self._note(f"{prefix}{field}", reason, fields, field, None if prefix else fields.value("name"))

    def _note(self, name: str, reason: str, fields: _Fields, field: str, step: str | None = None) -> None:
        _, steps = self._without_effect.setdefault((name, reason), (fields.line(field), []))
        steps += [step] if step is not None and fields is not self._head else []

    def _warn(self) -> None:
        for (name, reason), (line, steps) in sorted(self._without_effect.items(), key=lambda item: item[1][0]):
            of = f" (step{'s' if len(steps) > 1 else ''} {', '.join(steps)})" if steps else ""
            message = f"{name} has no effect here{of}: {reason}"
            warnings.warn_explicit(message, TemplateWarning, str(self._file), line)


def _says_something(value: Any) -> bool:
    """Tell whether a value is more than empty, or `default`, which templates write for nothing."""
    if isinstance(value, dict | list):
        return any(_says_something(each) for each in (value.values() if isinstance(value, dict) else value))
    return value not in (None, "", "default")


def _imported(reference: str) -> Any:
    """Import `module:function` or `module.function`; LookupError names the part that does not exist."""
    module, mark, names = reference.partition(":")
    if not mark:
        module, _, names = reference.rpartition(".")
    try:
        if module.startswith("."):
            raise ValueError(f"{module!r} is a relative name")  # noqa: TRY301 - the same error as of an empty name
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and a module that it imports does not
        raise LookupError(f"cannot import {reference!r}: there is no module {error.name!r}") from None
    except (AttributeError, ValueError) as error:
        raise LookupError(f"cannot import {reference!r}: {error}") from None
    return found
