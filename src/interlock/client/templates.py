"""Loads workflows from YAML templates, with the same steps and options as in Python.

Invariant: a template is declared by the same calls as a workflow in Python; every error names the file, the line and
the field.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from interlock.errors import DefinitionError, InputError
from interlock.model.backoff import Backoff
from interlock.model.graph import KINDS_WITH_HANDLER, STEP_FIELDS, STEP_KINDS, GraphError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from interlock.client.registry import Definitions
    from interlock.client.workflow import Workflow

SUFFIXES = (".yaml", ".yml")
# names in templates that differ from those in the definition document
HEAD_NAMES = {"namespace_name": "namespace", "timeout_seconds": "timeout"}
STEP_NAMES = {"dependencies": "after", "timeout_seconds": "timeout", "type": "kind", "handler": "type"}
KIND_NAMES = {"standard": "plain", "decision_point": "decision"}
RETRY_NAMES = {"limit": "max_tries", "max_attempts": "max_tries", "backoff": "kind"}
MILLISECONDS = {"backoff_base_ms": "base", "max_backoff_ms": "cap"}
HEAD = ("name", "namespace", "version", "description", "input_schema", "timeout", "steps")
_IN_RETRY = ("max_tries", "backoff")
STEP = ("description", "retry", *sorted({name for names in STEP_FIELDS.values() for name in names} - set(_IN_RETRY)))
RETRY = ("max_tries", "retryable", "kind", "base", "cap", "jitter", *MILLISECONDS)
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class TemplateError(DefinitionError):
    """A template is invalid; the message names the file, the line and the field."""

    def __init__(self, file: Path, line: int, place: str, message: str) -> None:
        self.file = file
        self.line = line
        super().__init__(": ".join(filter(None, (f"{file}, line {line}", place, message))))


class _Loader(yaml.SafeLoader):
    """Reads YAML as JSON: timestamps stay strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_templates(app: Definitions, path: str | Path) -> list[Workflow]:
    """Declare the workflows of a file, or of all templates in a directory, on an app."""
    try:
        place = Path(path)
    except TypeError:
        raise DefinitionError(f"templates need the path of a file or a directory, got {path!r}") from None
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES) if place.is_dir() else [place]
    if not files:
        raise DefinitionError(f"there are no templates in {place}; their names end in {' or '.join(SUFFIXES)}")
    return [workflow for file in files for workflow in _load_file(app, file)]


def _load_file(app: Definitions, file: Path) -> list[Workflow]:
    workflows = list(_load_documents(app, file))
    if not workflows:
        raise DefinitionError(f"template {file} is empty; it needs a workflow with a name and steps")
    return workflows


def _load_documents(app: Definitions, file: Path) -> Iterator[Workflow]:
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DefinitionError(f"template {file} cannot be read: {error}") from None
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield _Template(app, file, loader, node).workflow()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"{error.context or ''} {error.problem or ''}".strip()
        raise TemplateError(file, 0 if mark is None else mark.line + 1, "", f"it is not YAML: {problem}") from None
    finally:
        loader.dispose()


class _Template:
    """One YAML document of a file."""

    def __init__(self, app: Definitions, file: Path, loader: _Loader, node: yaml.Node) -> None:
        self._app = app
        self._file = file
        self._loader = loader
        self._node = node

    def workflow(self) -> Workflow:
        head = _Fields(self, self._node, "", HEAD, HEAD_NAMES)
        fields = [head]
        try:
            made = self._app.workflow(**self._options(head))
            for node in self._steps(head):
                fields.append(_Fields(self, node, f"steps[{len(fields) - 1}]", STEP, STEP_NAMES))
                self._add(made, fields[-1])
            made.document  # noqa: B018 - it is checked as a whole
        except GraphError as error:
            raise self._located(error, fields) from None
        except TemplateError:
            raise
        except DefinitionError as error:
            raise fields[-1].refuse("name" if fields[-1] is head else "type", str(error)) from None
        return made

    def _options(self, head: _Fields) -> dict[str, Any]:
        options = {"name": None, **{field: self.value(node) for field, node in head.nodes.items()}}
        version = head.nodes.get("version")
        if isinstance(version, yaml.ScalarNode):
            options["version"] = version.value  # as it is written: 1.10 is not 1.1
        return {field: value for field, value in options.items() if field not in {"steps", "description"}}

    def _steps(self, head: _Fields) -> list[yaml.Node]:
        node = head.nodes.get("steps")
        if not isinstance(node, yaml.SequenceNode):
            raise head.refuse("steps", "a template needs a list of steps")
        steps: list[yaml.Node] = node.value
        return steps

    def _located(self, error: GraphError, fields: list[_Fields]) -> TemplateError:
        if error.path[:1] == ("steps",) and len(error.path) > 1:
            where: _Fields = fields[error.path[1] + 1]
            return where.refuse(str(error.path[-1]), error.message)
        return fields[0].refuse(str(error.path[-1]) if error.path else "name", error.message)

    def _add(self, workflow: Workflow, fields: _Fields) -> None:
        name = self.value(fields.nodes.get("name"))
        if name is None:
            raise fields.refuse("name", "a step needs a name")
        fields.place = f"step {name!r}"
        fields.pop("description")
        tries = self._tries(fields)
        handler, config = self._handler(fields)
        options = {field: self.value(node) for field, node in fields.nodes.items()}
        kind = options.pop("kind", "plain")
        kind = KIND_NAMES.get(str(kind), kind)
        if handler is not None and kind in STEP_KINDS and kind not in KINDS_WITH_HANDLER:
            raise fields.refuse("type", f"a step of type {kind} has no handler of its own")
        if config:
            options["config"] = {**config, **(options.get("config") or {})}
        compensate = self._found(fields, "compensate", options.pop("compensate", None))
        workflow.add(kind, handler, compensate=compensate, **options, **tries)

    def _handler(self, fields: _Fields) -> tuple[Any, dict[str, Any]]:
        """Return the handler, and its `initialization`, which becomes `config`."""
        said: Any = self.value(fields.nodes.get("type"))
        config: dict[str, Any] = {}
        if isinstance(said, dict):
            unknown = said.keys() - {"callable", "initialization"}
            if unknown:
                problem = f"unknown field: {min(map(str, unknown))}; known are callable and initialization"
                raise fields.refuse("type", problem)
            said, config = said.get("callable"), said.get("initialization") or {}
        handler = self._found(fields, "type", said)
        fields.pop("type")
        return handler, config

    def _found(self, fields: _Fields, field: str, said: Any) -> Any:
        """Find the handler that a template names: a task of the app, or a function to import."""
        if said is None:
            return None
        if not isinstance(said, str):
            raise fields.refuse(field, f"a handler must be the name of a task or module:function, got {said!r}")
        if said in self._app.tasks:
            return said
        if ":" not in said:
            known = ", ".join(sorted(name for name in self._app.tasks if "/" not in name))
            raise fields.refuse(field, f"the app has no task {said!r}; it has {known}; a function is module:name")
        try:
            return _imported(said)
        except LookupError as error:
            raise fields.refuse(field, str(error.args[0])) from None

    def _tries(self, fields: _Fields) -> dict[str, Any]:
        node = fields.nodes.pop("retry", None)
        if node is None:
            return {}
        retry = _Fields(self, node, f"{fields.place}, retry", RETRY, RETRY_NAMES)
        said = {name: self.value(value) for name, value in retry.nodes.items()}
        tries = said.pop("max_tries", None)
        if said.pop("retryable", True) is False:
            tries = 1
        for name, seconds in MILLISECONDS.items():
            value = said.pop(name, None)
            if isinstance(value, int | float):
                said[seconds] = value / 1000
        try:
            return {"max_tries": tries, "backoff": Backoff.from_json(said) if said else None}
        except InputError as error:
            raise fields.refuse("backoff", str(error)) from None

    def value(self, node: yaml.Node | None) -> Any:
        return None if node is None else self._loader.construct_object(node, deep=True)

    def refuse(self, node: yaml.Node, place: str, message: str) -> TemplateError:
        return TemplateError(self._file, node.start_mark.line + 1, place, message)


class _Fields:
    """The fields of one mapping, each with its place in the file."""

    def __init__(
        self, template: _Template, node: yaml.Node, place: str, known: tuple[str, ...], names: Mapping[str, str]
    ) -> None:
        self._template = template
        self._node = node
        self.place = place
        self.nodes: dict[str, yaml.Node] = {}
        self._written: dict[str, yaml.Node] = {}
        if not isinstance(node, yaml.MappingNode):
            raise template.refuse(node, place, "expected a mapping of fields")
        for key, value in node.value:
            said = str(key.value)
            field = names.get(said, said)
            if said not in names and said not in known:
                problem = f"unknown field: {said}; known are {', '.join(sorted({*names, *known}))}"
                raise template.refuse(key, place, problem)
            if field in self.nodes:
                raise template.refuse(key, place, f"the field {said} is given twice")
            self.nodes[field], self._written[field] = value, key

    def pop(self, field: str) -> yaml.Node | None:
        return self.nodes.pop(field, None)

    def refuse(self, field: str, message: str) -> TemplateError:
        known = "retry" if field in _IN_RETRY else field
        node = self._written.get(known)
        written = str(node.value) if node is not None else known
        return self._template.refuse(node or self._node, ", ".join(filter(None, (self.place, written))), message)


def _imported(reference: str) -> Any:
    """Import `module:function`; LookupError names the part that does not exist."""
    module, _, names = reference.partition(":")
    try:
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
