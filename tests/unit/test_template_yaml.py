"""Malformed templates: any content of a file is loaded or refused with file and line, never with a raw exception."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from interlock import Interlock
from interlock.client.template_yaml import MAX_BYTES, MAX_DEPTH, TemplateError
from interlock.client.templates import STEP, STEP_NAMES, check_templates
from interlock.errors import DefinitionError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit

EXAMPLES = int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 100)
SLEEP = "name: orders\nsteps:\n  - {name: a, type: sleep, seconds: 1}\n"


def refused(file: Path, content: str | bytes) -> TemplateError:
    """Load a template that is invalid, and return the error."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TemplateError) as error:
        Interlock("postgresql://nowhere").load_templates(file)
    assert str(error.value).startswith(f"{file}, line {error.value.line}: ")
    return error.value


@pytest.mark.parametrize(
    ("content", "line", "told"),
    [
        ("name: {a: 1}\nsteps: []", 1, "name: must be a string, not {'a': 1}"),
        ("name: 3\nsteps: []", 1, "name: must be a string, not 3"),
        ("name: on\nsteps: []", 1, "name: must be a string, not True"),
        ("name: orders\nsteps:\n  - name: {a: 1}", 3, "steps[0], name: must be a string, not {'a': 1}"),
        ("name: orders\nsteps:\n  - name: a\n    type: []", 4, "step 'a', type: must be a string, not []"),
        ("name: orders\nsteps:\n  - name: a\n    type: {b: 1}", 4, "step 'a', type: must be a string"),
        ("name: orders\nsteps:\n  - {name: a, type: sleep, after: {b: 1}}", 3, "after: must be a list of the names"),
        ("name: orders\nsteps:\n  - {name: a, type: sleep, seconds: []}", 3, "step 'a', seconds: it must be"),
        ("name: orders\nversion: [1]\nsteps: []", 2, "version: a version is a string"),
        ("name: orders\nnamespace: [1]\nsteps: []", 2, "namespace must be a non-empty string"),
        ("name: orders\n? [a]\n: b", 2, "a key must be a string, not a list or a mapping"),
        ("name: orders\n3: b", 2, "a key must be a string, not '3'"),
        ("name: orders\nnull: b", 2, "a key must be a string, not 'null'"),
        ("name: orders\ninput_schema:\n  type: object\n  type: array", 4, "the key 'type' is given twice"),
        ("name: orders\ntimeout: .nan", 2, "JSON has no such value: '.nan'"),
        ("name: orders\ntimeout: -.inf", 2, "JSON has no such value: '-.inf'"),
        (f"name: orders\ntimeout: {'9' * 40}", 2, "JSON has no such value: '999"),
        (f"name: orders\ntimeout: {'9' * 5000}", 2, "9 is no int"),
        ("name: orders\ntimeout: !!int abc", 2, "'abc' is no int"),
        ("name: orders\ntimeout: !!int ''", 2, "'' is no int"),
        ("name: orders\ntimeout: !!bool maybe", 2, "'maybe' is no bool"),
        ("name: orders\ntimeout: !!timestamp 2030-01-01", 2, "the tag 'tag:yaml.org,2002:timestamp' is not known"),
        ("name: orders\ntimeout: !!binary aGk=", 2, "the tag 'tag:yaml.org,2002:binary' is not known"),
        ("name: orders\nmetadata: !!set {a, b}", 2, "the tag 'tag:yaml.org,2002:set' is not known"),
        ("name: orders\nmetadata: !!python/object/apply:os.getpid []", 2, "the tag 'tag:yaml.org,2002:python/object"),
        ("name: orders\nmetadata: !own [a]", 2, "the tag '!own' is not known in templates"),
        ('name: "\\ud800"', 1, "JSON has no such value"),
        ('name: "\\UFFFFFFFF"', 1, "it is not YAML: "),
        ('name: orders\ndescription: "\\0"', 2, "JSON has no such value"),
        ("name: orders\nmetadata: <<", 2, "<< is valid only as a key"),
        ("name: orders\nmetadata: {<<: 3}", 2, "it is not YAML: "),
        ("name: orders\nmetadata: &a [*a]", 2, "the alias 'a' stands inside of what it refers to"),
        ("name: orders\nmetadata: &a {<<: *a}", 2, "the alias 'a' stands inside of what it refers to"),
        ("name: orders\nmetadata: *gone", 2, "it is not YAML: found undefined alias"),
        ("name: orders\n\tsteps: []", 2, "it is not YAML: "),
        (b"name: orders\ndescription: \xff\xfe", 2, "it is not text in UTF-8: invalid start byte"),
        (b"name: orders\ndescription: \x07", 2, "the character '\\x07' is not allowed in YAML"),
        (b"\x89PNG\r\n\x1a\n", 1, "it is not text in UTF-8"),
        ("<%= erb %>\nname: orders", 2, "it is not YAML: "),
        ("name: orders\nsteps: " + "[" * 100_000, 2, f"are nested more than {MAX_DEPTH} levels deep"),
        ("name: orders\nsteps:" + "".join(f"\n{' ' * at}-" for at in range(400)), 52, "levels deep"),
        ("name: orders\nmetadata: " + "{a: " * 100_000, 2, f"are nested more than {MAX_DEPTH} levels deep"),
        (SLEEP + "---\nname: [", 5, "it is not YAML: "),
    ],
)
def test_malformed_yaml_is_refused_with_file_and_line(
    tmp_path: Path, content: str | bytes, line: int, told: str
) -> None:
    error = refused(tmp_path / "orders.yaml", content)
    assert error.line == line
    assert told in str(error)


def test_aliases_that_multiply_values_are_refused(tmp_path: Path) -> None:
    laughs = "".join(f"  l{at}: &l{at} [{', '.join([f'*l{at - 1}'] * 9)}]\n" for at in range(1, 30))
    error = refused(tmp_path / "orders.yaml", f"name: orders\nmetadata:\n  l0: &l0 [ha]\n{laughs}")
    assert "more than 100,000 values, with what its aliases refer to" in str(error)
    assert error.line == 8  # 9 ** 5 = 59049 values are fewer, 9 ** 6 are more, with the lines before
    chain = "".join(f"  l{at}: &l{at} [*l{at - 1}]\n" for at in range(1, 100))
    deep = refused(tmp_path / "orders.yaml", f"name: orders\nmetadata:\n  l0: &l0 [ha]\n{chain}")
    assert "nested more than 50 levels deep" in str(deep)


def test_a_file_that_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    file.write_bytes(b"a" * (MAX_BYTES + 1))
    with pytest.raises(DefinitionError, match="is too large: a template has at most 1,000,000 bytes"):
        Interlock("postgresql://nowhere").load_templates(file)
    with pytest.raises(DefinitionError, match="cannot be read"):
        Interlock("postgresql://nowhere").load_templates("a\0b")


def test_anchors_and_merge_keys_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    file.write_text("""
name: orders
steps:
  - &wait {name: a, type: sleep, seconds: 1, config: &config {operation: =, day: 2030-01-01}}
  - {<<: *wait, name: b, config: {<<: [*config, {operation: lost}], more: [*config, *config]}}
""")
    (loaded,) = Interlock("postgresql://nowhere").load_templates(file)
    first, second = loaded.document["steps"]
    config = {"operation": "=", "day": "2030-01-01"}
    assert (first["name"], first["config"]) == ("a", config)
    assert (second["name"], second["kind"], second["seconds"]) == ("b", "sleep", 1)
    assert second["config"] == {**config, "more": [config, config]}


@settings(
    max_examples=int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 100),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.text(max_size=60) | st.text(st.sampled_from("abn:-[]{}&*!<>|?#%@,'\"\\ \n\t.0159~x"), max_size=80))
@example("%YAML " + "9" * 5000 + ".1\n--- a")
@example("!!int : a")
@example("? ")
@example("&a : *a")
def test_any_text_is_loaded_or_refused(tmp_path: Path, text: str) -> None:
    _load(tmp_path, text)


INNER_FIELDS = (
    "name", "handler", "callable", "method", "initialization", "retryable", "max_attempts", "backoff", "steps", "type",
    "backoff_base_ms", "max_delay", "worker_template", "failure_strategy", "batch_size", "test", "max_duration_minutes",
)  # fmt: skip
WORDS = ("a", "b", "ALL", "all", "any", "map", "sleep", "decision", "batchable", "batch_worker", "linear", "x:y")
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER_FIELDS), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@settings(
    max_examples=int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.dictionaries(
        st.sampled_from(["namespace", "version", "timeout", "input_schema", "lifecycle", "environments", "metadata"]),
        VALUES,
        max_size=2,
    ),
    st.lists(st.dictionaries(st.sampled_from(sorted({*STEP, *STEP_NAMES} - {"name"})), VALUES, max_size=3), max_size=3),
)
@example({}, [{"retry": {"backoff_base_ms": 10**300}}])
@example({"environments": {"test": {"steps": [{"name": "ALL", "handler": {"initialization": []}}]}}}, [{}])
def test_any_values_of_known_fields_are_loaded_or_refused(
    tmp_path: Path, head: dict[str, Any], steps: list[dict[str, Any]]
) -> None:
    named = [{"name": "abc"[at], "handler": "h", **step} for at, step in enumerate(steps)]
    _load(tmp_path, yaml.safe_dump({"name": "orders", **head, "steps": named}))


def _load(place: Path, text: str) -> None:
    file = place / "any.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    refusal: DefinitionError | None = None
    try:
        check_templates(file, environment="test")
    except DefinitionError as error:
        refusal = error
    assert refusal is None or str(file) in str(refusal)
    assert not isinstance(refusal, TemplateError) or refusal.line >= 1
