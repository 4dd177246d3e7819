"""Workflows from YAML: the same steps and options as in Python, under the names that templates have for them.

Invariant: a template becomes a workflow by the same calls as one that is declared in Python; every refusal names the
file, the line and the field.
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
# what templates call by another name than the definition document
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
    """A template makes no sense; the message names the file, the line and the field."""

    def __init__(self, file: Path, line: int, place: str, message: str) -> None:
        self.file = file
        self.line = line
        super().__init__(": ".join(filter(None, (f"{file}, line {line}", place, message))))


class _Loader(yaml.SafeLoader):
    """Reads YAML as JSON: times stay texts."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_templates(app: Definitions, path: str | Path) -> list[Workflow]:
    """Declare the workflows of a file, or of all templates in a directory, on an app."""
    try:
        place = Path(path)
    except TypeError:
        raise DefinitionError(f"templates are in a file or a directory, so give its path, not {path!r}") from None
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES) if place.is_dir() else [place]
    if not files:
        raise DefinitionError(f"there are no templates in {place}; their names end in {' or '.join(SUFFIXES)}")
    return [workflow for file in files for workflow in _all_of(app, file)]


def _all_of(app: Definitions, file: Path) -> list[Workflow]:
    workflows = list(_loaded(app, file))
    if not workflows:
        raise DefinitionError(f"the template {file} is empty: a workflow with a name and steps must stand in it")
    return workflows


def _loaded(app: Definitions, file: Path) -> Iterator[Workflow]:
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DefinitionError(f"the template {file} cannot be read: {error}") from None
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield _Template(app, file, loader, node).workflow()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = f"{error.context or ''} {error.problem or ''}".strip()
        raise TemplateError(file, 0 if mark is None else mark.line + 1, "", f"it is no YAML: {told}") from None
    finally:
        loader.dispose()


class _Template:
    """One document of a file."""

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
        """Give the handler, and what a template says about its initialization, which is config here."""
        said: Any = self.value(fields.nodes.get("type"))
        config: dict[str, Any] = {}
        if isinstance(said, dict):
            unknown = said.keys() - {"callable", "initialization"}
            if unknown:
                told = f"there is no such field: {min(map(str, unknown))}; known are callable and initialization"
                raise fields.refuse("type", told)
            said, config = said.get("callable"), said.get("initialization") or {}
        handler = self._found(fields, "type", said)
        fields.pop("type")
        return handler, config

    def _found(self, fields: _Fields, field: str, said: Any) -> Any:
        """Give the handler that a template names: the type of a task, or a function that is imported."""
        if said is None:
            return None
        if not isinstance(said, str):
            raise fields.refuse(field, f"a handler is the type of a task, or module:function, not {said!r}")
        if said in self._app.tasks:
            return said
        if ":" not in said:
            known = ", ".join(sorted(name for name in self._app.tasks if "/" not in name))
            raise fields.refuse(field, f"the app has no task {said!r}; it has {known}; or name a function: module:name")
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
    """The fields of one mapping, each with the place where it is written."""

    def __init__(
        self, template: _Template, node: yaml.Node, place: str, known: tuple[str, ...], names: Mapping[str, str]
    ) -> None:
        self._template = template
        self._node = node
        self.place = place
        self.nodes: dict[str, yaml.Node] = {}
        self._written: dict[str, yaml.Node] = {}
        if not isinstance(node, yaml.MappingNode):
            raise template.refuse(node, place, "a mapping of fields must stand here")
        for key, value in node.value:
            said = str(key.value)
            field = names.get(said, said)
            if said not in names and said not in known:
                told = f"there is no such field: {said}; known are {', '.join(sorted({*names, *known}))}"
                raise template.refuse(key, place, told)
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
    """Give what `module:function` leads to; LookupError says where the way ends."""
    module, _, names = reference.partition(":")
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise LookupError(f"there is no module {error.name!r} to take {reference!r} from") from None
    except (AttributeError, ValueError) as error:
        raise LookupError(f"{reference!r} leads nowhere: {error}") from None
    return found
