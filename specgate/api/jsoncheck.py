"""A small JSON-schema checker whose messages name the field, what it is, and what is allowed.

It knows the keywords that `specgate.api.schema` uses, so that the same tables check requests and
describe them in `/openapi.json`. `null` for an optional property counts as absent.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from specgate.errors import BadRequest, UnknownParameter

Schema = Mapping[str, Any]

_MAX_LISTED = 12
_KINDS: Mapping[str, str] = {
    "object": "an object",
    "array": "an array",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


def check(value: Any, schema: Schema, path: str = "") -> None:
    """Raises BadRequest naming `path` at the first fault."""
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], path)
        return
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        raise BadRequest(f"{_name(path)} is {shown(value)}; it must be {_KINDS[kind]}.", path or None)
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(repr(v) for v in schema["enum"])
        raise BadRequest(f"{_name(path)} is {shown(value)}; allowed: {allowed}.", path or None)
    if kind in ("integer", "number"):
        _check_range(value, schema, path)
    elif kind == "string":
        _check_size(len(value), schema, path, ("minLength", "maxLength"), "characters")
    elif kind == "array":
        _check_size(len(value), schema, path, ("minItems", "maxItems"), "items")
        items: Schema = schema.get("items", {})
        if _all_good(value, items):
            return
        for index, item in enumerate(value if items else ()):
            check(item, items, f"{path}[{index}]")
    elif kind == "object":
        _check_object(value, schema, path)


def _all_good(value: list[Any], items: Schema) -> bool:
    """The quick answer for long lists of whole numbers, such as token ids."""
    if items.get("type") != "integer" or not value or not all(type(item) is int for item in value):
        return False
    return bool(items.get("minimum", -math.inf) <= min(value) <= max(value) <= items.get("maximum", math.inf))


def _check_object(value: Mapping[str, Any], schema: Schema, path: str) -> None:
    _check_size(len(value), schema, path, ("minProperties", "maxProperties"), "entries")
    properties: Mapping[str, Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    others = schema.get("additionalProperties", True)
    _refuse_unknown(value, properties, others, path)
    for key in required:
        if key not in value:
            at = f"{path}.{key}" if path else key
            raise BadRequest(f"{_name(at)} is required.", at, code="missing_required_parameter")
    for key, item in value.items():
        at = f"{path}.{key}" if path else key
        if key in properties:
            if item is not None or key in required:
                check(item, properties[key], at)
        elif isinstance(others, Mapping):
            check(item, others, at[:200])


def _refuse_unknown(
    value: Mapping[str, Any], properties: Mapping[str, Schema], others: Any, path: str
) -> None:
    for key in value if others is False else ():
        if key in properties:
            continue
        at = (f"{path}.{key}" if path else key)[:200]
        near = difflib.get_close_matches(key[:64], properties, n=1)
        if near:
            hint = f" Did you mean {near[0]!r}?"
        else:
            hint = f" Allowed: {', '.join(properties)}." if len(properties) <= _MAX_LISTED else ""
        raise UnknownParameter(f"{_name(at)} is not a field of this API.{hint}", at)


def _check_any(value: Any, options: list[Schema], path: str) -> None:
    """The first option of the value's own kind decides, so that the message is about that one;
    arrays are told apart by their first item."""
    fitting = [o for o in options if "type" not in o or _is(value, o["type"])]
    if not fitting:
        kinds = " or ".join(_KINDS[o["type"]] for o in options)
        raise BadRequest(f"{_name(path)} is {shown(value)}; it must be {kinds}.", path or None)
    if len(fitting) > 1 and isinstance(value, list) and value:
        by_item = [o for o in fitting if _fits(value[0], o.get("items", {}))]
        fitting = by_item or fitting
    check(value, fitting[0], path)


def _fits(value: Any, schema: Schema) -> bool:
    return "type" not in schema or _is(value, schema["type"])


def _check_range(value: float, schema: Schema, path: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and value < low:
        raise BadRequest(f"{_name(path)} is {shown(value)}; it must be at least {low}.", path)
    if high is not None and value > high:
        raise BadRequest(f"{_name(path)} is {shown(value)}; it must be at most {high}.", path)


def _check_size(size: int, schema: Schema, path: str, keys: tuple[str, str], unit: str) -> None:
    low, high = schema.get(keys[0]), schema.get(keys[1])
    if low is not None and size < low:
        raise BadRequest(f"{_name(path)} has {size} {unit}; it needs at least {low}.", path or None)
    if high is not None and size > high:
        raise BadRequest(f"{_name(path)} has {size} {unit}; at most {high} are allowed.", path or None)


def _is(value: Any, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    types = {"object": dict, "array": list, "string": str, "boolean": bool}
    return isinstance(value, types[kind])


def _name(path: str) -> str:
    return repr(path) if path else "The body"


def shown(value: Any) -> str:
    """The value, short enough for a message: containers by kind only."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) > 10**30:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 64 else text[:60] + "...'"
