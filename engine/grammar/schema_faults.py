"""Which part of a JSON schema cannot be turned into a grammar. Plain Python.

The grammar library says what is wrong, not where. So where a schema fails, its parts are tried
one by one, and the innermost that fails by itself is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_MAX_TRIES = 500

Check = Callable[[Any], str | None]


def find_fault(schema: Any, check: Check) -> tuple[str, str] | None:
    """(path, what is wrong) of the innermost part at fault, or None. `check` judges a whole schema.

    The path is written as in JavaScript: `.properties.age`, `.anyOf[1]`, "" for the whole.
    """
    message = check(schema)
    if message is None:
        return None
    if not isinstance(schema, dict):
        return "", message
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    tries = iter(range(_MAX_TRIES))
    path, part = "", schema
    while True:
        inner = _first_fault(part, path, shared, check, tries)
        if inner is None:
            return path, in_one_line(message)
        path, part, message = inner


def _first_fault(
    schema: dict[str, Any], path: str, shared: dict[str, Any], check: Check, tries: Iterator[int]
) -> tuple[str, dict[str, Any], str] | None:
    for step, part in _parts(schema):
        if not isinstance(part, dict) or next(tries, None) is None:
            continue
        message = check(_standing_alone(part, shared))
        if message is not None:
            return path + step, part, message
    return None


def _standing_alone(part: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The part with the definitions that it may refer to."""
    return {name: value for name, value in shared.items() if name not in part} | part


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Sub-schemas with the step to them, definitions first: they make others fail."""
    for name in sorted(_MAPS, key=lambda name: name not in ("$defs", "definitions")):
        value = schema.get(name)
        if isinstance(value, dict):
            for key, part in value.items():
                yield f".{name}.{key}" if key.isidentifier() else f".{name}[{key!r}]", part
    for name in _LISTS:
        value = schema.get(name)
        if isinstance(value, list):
            for place, part in enumerate(value):
                yield f".{name}[{place}]", part
    for name in _SINGLES:
        if name in schema:
            yield f".{name}", schema[name]


def in_one_line(message: str) -> str:
    """Without the line breaks that show where in a pattern a fault is."""
    return " ".join(message.split())
