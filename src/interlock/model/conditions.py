"""Conditions of steps (`when`): a small, safe expression language over the results of steps and the job's input.

The syntax is a subset of Python's: paths (`price.total`, `rows[0]`, `results["my-step"]`), literals, comparisons, `in`,
`and`, `or`, `not` and `len(path)`. A path that does not exist is null. An order comparison of values that cannot be
ordered is false. Nothing is executed: the text is parsed once and the tree is walked.
"""

from __future__ import annotations

import ast
import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MAX_CONDITION_LENGTH = 2_000
MAX_CONDITION_DEPTH = 100  # the evaluation recurses
_LITERAL_NAMES: Mapping[str, Any] = {"true": True, "false": False, "null": None}
RESULTS = "results"  # results["my-step"]: for a step whose name is no identifier
_ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARISONS = frozenset({ast.Eq, ast.NotEq, ast.In, ast.NotIn, *_ORDER})
_SYNTAX = "such as \"price.total > 100 and input.country in ['CH', 'DE']\""


class Condition:
    """A parsed condition; `names` are the steps (and `input`) whose values it needs, and `input_fields` the fields."""

    __slots__ = ("_tree", "input_fields", "names", "text")

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise ValueError(f"a condition is a non-empty string {_SYNTAX}, not {text!r:.100}")
        if len(text) > MAX_CONDITION_LENGTH:
            raise ValueError(f"a condition has at most {MAX_CONDITION_LENGTH} characters, this one has {len(text)}")
        self.text = text.strip()
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            detail = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
            raise ValueError(f"{self.text!r:.200} is not a condition {_SYNTAX}: {detail}") from None
        self.names: frozenset[str] = frozenset(self._collect_names(self._tree))
        self.input_fields: frozenset[str] = frozenset(_input_fields(self._tree))

    def is_met(self, values: Mapping[str, Any]) -> bool:
        """Evaluate the condition; `values` has the job's input under "input" and the results of steps by name."""
        return bool(_evaluate(self._tree, values))

    def _collect_names(self, tree: ast.expr) -> set[str]:
        """Check every node, and collect the names of steps."""
        names: set[str] = set()
        level = [tree]
        for _ in range(MAX_CONDITION_DEPTH):
            level = [inner for node in level for inner in self._check_node(node, names)]
        if level:
            raise self._error(f"it is nested more than {MAX_CONDITION_DEPTH} levels deep")
        return names - _LITERAL_NAMES.keys()

    def _check_node(self, node: ast.expr, names: set[str]) -> Sequence[ast.expr]:
        """Check one node, and return the nodes in it; a name is added to `names`."""
        match node:
            case ast.Subscript(value=ast.Name(id="results"), slice=ast.Constant(value=str() as name)):
                names.add(name)
            case ast.Name(id=name) if name != RESULTS:
                names.add(name)
            case ast.BoolOp(values=items) | ast.List(elts=items) | ast.Tuple(elts=items):
                return items
            case ast.Compare(left=item, ops=ops, comparators=others) if _COMPARISONS.issuperset(map(type, ops)):
                return [item, *others]
            case (
                ast.UnaryOp(op=ast.Not() | ast.USub(), operand=item)
                | ast.Call(func=ast.Name(id="len"), args=[item], keywords=[])
                | ast.Attribute(value=item)
                | ast.Subscript(value=item, slice=ast.Constant(value=str() | int()))
                | ast.Subscript(value=item, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int())))
            ):
                return [item]
            case ast.Constant(value=value) if value is None or type(value) in {bool, int, float, str}:
                pass
            case _:
                raise self._error("it may have paths, literals, comparisons, in, and, or, not and len(path)")
        return ()

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.text!r:.200} is not a condition {_SYNTAX}: {message}")


@lru_cache(maxsize=1_000)
def parse_condition(text: str) -> Condition:
    """Parse a condition; ValueError says what is wrong with it."""
    return Condition(text)


def _input_fields(tree: ast.expr) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="input"), attr=name)
                | ast.Subscript(value=ast.Name(id="input"), slice=ast.Constant(value=str() as name))
            ):
                yield name


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp() | ast.UnaryOp() | ast.Compare():
            return _evaluate_operator(node, values)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, values) for item in items]
        case ast.Call(args=[path]):
            value = _evaluate(path, values)
            return len(value) if isinstance(value, list | str | dict) else 0
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id="results"), slice=ast.Constant(value=str() as name)):
            return _LITERAL_NAMES.get(name, values.get(name))
        case ast.Attribute(value=inner) | ast.Subscript(value=inner):
            key = node.attr if isinstance(node, ast.Attribute) else _evaluate(node.slice, values)
            return _member(_evaluate(inner, values), key)
    return getattr(node, "value", None)  # a literal


def _evaluate_operator(node: ast.BoolOp | ast.UnaryOp | ast.Compare, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(bool(_evaluate(part, values)) for part in parts)
        case ast.UnaryOp(op=op, operand=operand):
            value = _evaluate(operand, values)
            return not value if isinstance(op, ast.Not) else -value if isinstance(value, int | float) else None
    sides = [_evaluate(side, values) for side in (node.left, *node.comparators)]
    return all(_compare(op, *pair) for op, *pair in zip(node.ops, sides, sides[1:], strict=False))


def _member(value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return None


def _compare(op: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(op, ast.Eq):
        return _is_equal(left, right)
    if isinstance(op, ast.NotEq):
        return not _is_equal(left, right)
    if isinstance(op, ast.In | ast.NotIn):
        if isinstance(right, str):
            found = isinstance(left, str) and left in right
        else:
            found = any(_is_equal(left, item) for item in right) if isinstance(right, list | dict) else False
        return found is isinstance(op, ast.In)
    comparable = all(type(side) in {int, float} for side in (left, right)) or (
        isinstance(left, str) and isinstance(right, str)
    )
    return comparable and bool(_ORDER[type(op)](left, right))


def _is_equal(left: Any, right: Any) -> bool:
    # in JSON, true is not 1
    return isinstance(left, bool) is isinstance(right, bool) and bool(left == right)
