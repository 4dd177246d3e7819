"""Reads the YAML of templates: documents whose values are JSON, each with its line.

Invariant: a file of any content gives nodes that `node_value` converts to JSON, or a TemplateError with file and line.
Size, depth and number of nodes are limited, also where aliases multiply them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from interlock.errors import DefinitionError
from interlock.model.json_values import is_storable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 1_000_000  # of a file
MAX_DEPTH = 50  # of nested lists and mappings
MAX_NODES = 100_000  # of a document, with every alias counted as what it stands for
NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_STRING_TAG = "tag:yaml.org,2002:str"
_STRINGS_HERE = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")  # 2030-01-01 and = are strings
_CONSTRUCTOR = yaml.constructor.SafeConstructor()
_SCALARS = {
    NULL_TAG: _CONSTRUCTOR.construct_yaml_null,
    _STRING_TAG: _CONSTRUCTOR.construct_yaml_str,
    "tag:yaml.org,2002:bool": _CONSTRUCTOR.construct_yaml_bool,
    "tag:yaml.org,2002:int": _CONSTRUCTOR.construct_yaml_int,
    "tag:yaml.org,2002:float": _CONSTRUCTOR.construct_yaml_float,
}
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class TemplateError(DefinitionError):
    """A template is invalid; the message names the file, the line and the field."""

    def __init__(self, file: Path, line: int, place: str, message: str) -> None:
        self.file = file
        self.line = line
        super().__init__(": ".join(filter(None, (f"{file}, line {line}", place, message))))


def read_documents(file: Path) -> Iterator[yaml.Node]:
    """Read the documents of a file; an empty document is left out."""
    loader = _loader(file)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None and node.tag != NULL_TAG:
                yield node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"{error.context or ''} {error.problem or ''}".strip()
        raise TemplateError(file, 1 if mark is None else mark.line + 1, "", f"it is not YAML: {problem}") from None
    except (ValueError, OverflowError) as error:  # the parser converts escapes and directives without a check
        raise TemplateError(file, loader.line + 1, "", f"it is not YAML: {error}") from None
    finally:
        loader.dispose()


def node_value(node: yaml.Node) -> Any:
    """Convert a node to the JSON value that it stands for."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: node_value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [node_value(value) for value in node.value]
    return _SCALARS[node.tag](node)  # type: ignore[arg-type]  # a scalar node, as the loader has checked


def node_line(node: yaml.Node) -> int:
    """Return the line of a node, counted from 1."""
    return int(node.start_mark.line) + 1


def _loader(file: Path) -> _Loader:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL character
        raise DefinitionError(f"template {file} cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise DefinitionError(f"template {file} is too large: a template has at most {MAX_BYTES:,} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TemplateError(file, line, "", f"it is not text in UTF-8: {error.reason}") from None
    try:
        return _Loader(file, text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character {text[error.position]!r} is not allowed in YAML"
        raise TemplateError(file, line, "", problem) from None


class _Loader(yaml.SafeLoader):
    """Composes nodes of JSON values. Timestamps are strings; merge keys (`<<`) are resolved."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and the form that PyYAML reads
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _STRINGS_HERE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # nodes and levels, of each complete node
        super().__init__(text)

    def compose_document(self) -> yaml.Node | None:
        self._depth = self._nodes = 0
        self._sizes.clear()
        return super().compose_document()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML has no annotation here
        mark, before = event.start_mark, self._nodes
        self._depth += 1
        self._check_size(mark, self._depth)
        node = super().compose_node(parent, index)
        assert node is not None  # noqa: S101 - only documents can be empty
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise self._error(mark, f"the alias {event.anchor!r:.100} stands inside of what it refers to")
            size, levels = self._sizes[node]
            self._nodes += size
            self._check_size(mark, self._depth + levels)
        else:
            self._nodes += 1
            self._sizes[node] = self._nodes - before, self._levels(node)
        self._depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag == _MERGE_TAG:
            return node  # valid as a key only
        self._check_tag(node, tuple(_SCALARS))
        try:
            value = _SCALARS[node.tag](node)
        except (ValueError, LookupError, OverflowError):
            raise self._error(node.start_mark, f"{node.value!r:.100} is no {node.tag.rpartition(':')[2]}") from None
        if not is_storable(value):
            raise self._error(node.start_mark, f"JSON has no such value: {node.value!r:.100}")
        return node

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        node = super().compose_sequence_node(anchor)
        self._check_tag(node, _COLLECTION_TAGS)
        for item in node.value:
            self._check_no_merge(item)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        self._check_tag(node, _COLLECTION_TAGS)
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in {_STRING_TAG, _MERGE_TAG}:
                said = repr(key.value)[:100] if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                raise self._error(key.start_mark, f"a key must be a string, not {said}; quote it if it is meant as one")
            if key.value in seen:
                raise self._error(key.start_mark, f"the key {key.value!r:.100} is given twice")
            seen.add(key.value)
            self._check_no_merge(value)
        self.flatten_mapping(node)  # merged keys come first, and later ones count
        node.value = list({key.value: (key, value) for key, value in node.value}.values())
        return node

    def _check_no_merge(self, node: yaml.Node) -> None:
        if node.tag == _MERGE_TAG:
            raise self._error(node.start_mark, "<< is valid only as a key")

    def _check_tag(self, node: yaml.Node, known: tuple[str, ...]) -> None:
        if node.tag not in known:
            raise self._error(node.start_mark, f"the tag {node.tag!r:.100} is not known in templates")

    def _levels(self, node: yaml.Node) -> int:
        """Return the number of levels of a complete node, itself included."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        pairs = isinstance(node, yaml.MappingNode)
        return 1 + max((self._sizes[value[1] if pairs else value][1] for value in node.value), default=0)

    def _check_size(self, mark: Any, levels: int) -> None:
        if levels > MAX_DEPTH:
            raise self._error(mark, f"lists and mappings are nested more than {MAX_DEPTH} levels deep")
        if self._nodes > MAX_NODES:
            raise self._error(mark, f"it has more than {MAX_NODES:,} values, with what its aliases refer to")

    def _error(self, mark: Any, problem: str) -> TemplateError:
        return TemplateError(self._file, mark.line + 1, "", problem)
