"""Requests made from an OpenAPI document: mostly right, wrong in one place, or not even JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]

_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "\x00", "\r\nX-Evil: 1", "\ud800", "\udfff lone", "a" * 5000, "../../etc", "null"]),
)
_NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, -(2**63), 2**64, 10**30, 10**400, 0.1, -0.0, 1e308, 5e-324]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXT)
ANY_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)
_RAW = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"{", b"null", b"[]", b'{"a":1,"a":2}']),
    st.sampled_from([b"\xef\xbb\xbf{}", b'{"a":01}', b"{'a':1}"]),
    st.integers(60, 20_000).map(lambda depth: b'{"a":' * depth + b"1" + b"}" * depth),
    st.integers(60, 20_000).map(lambda depth: b"[" * depth),
    st.integers(60, 20_000).map(lambda depth: b'{"messages":' + b"[" * depth + b"]" * depth + b"}"),
)
_TYPES = st.sampled_from(
    ["application/json"] * 12
    + ["text/plain", "application/xml", "multipart/form-data; boundary=x", ""]
    + ["application/json; charset=utf-16"]
)
_HEADERS = st.sampled_from(
    [{}] * 8
    + [
        {"X-Request-Id": "x" * 300}, {"X-Request-Id": "évil"}, {"X-SpecGate-Policy": "baseline"},
        {"X-SpecGate-Policy": "é" * 40}, {"Content-Encoding": "gzip"}, {"Authorization": "Bearer é"},
        {"Expect": "100-continue"},
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One request, as bytes."""

    method: str
    path: str
    template: str  # the path as documented
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def shots(document: Mapping[str, Any], model: str) -> st.SearchStrategy[Shot]:
    """Of all operations, those with a body most often. Not `drain`, which the others would not survive."""
    operations = []
    for template, methods in document["paths"].items():
        if template == "/admin/drain":
            continue
        for method, operation in methods.items():
            weight = 4 if "requestBody" in operation else 1
            operations += [_shot(template, method, operation, document, model)] * weight
    return st.one_of(operations)


def _shot(
    template: str, method: str, operation: Mapping[str, Any], document: Mapping[str, Any], model: str
) -> st.SearchStrategy[Shot]:
    bodies: st.SearchStrategy[bytes | None] = st.none()
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][content["$ref"].rpartition("/")[2]]
        bodies = _bodies(schema, model)
    names = [p["name"] for p in operation["parameters"] if p["in"] == "path"]
    paths = st.tuples(*[st.sampled_from(["a", model, "%00", "%0d%0a", "%ff", "x" * 300])] * len(names)).map(
        lambda values: _filled(template, dict(zip(names, values, strict=True)))
    )
    if any(p["in"] == "query" for p in operation["parameters"]):
        queries = st.sampled_from(["", "?limit=1", "?limit=-1", "?limit=9e9", "?limit=%00"])
        paths = st.tuples(paths, queries).map("".join)
    methods = st.sampled_from([method.upper()] * 15 + ["DELETE", "PATCH", "OPTIONS"])
    headers = st.tuples(_TYPES, _HEADERS).map(lambda pair: {"Content-Type": pair[0], **pair[1]})
    return st.builds(Shot, methods, paths, st.just(template), bodies, headers)


def _filled(template: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


def _bodies(schema: Schema, model: str) -> st.SearchStrategy[bytes | None]:
    right = from_schema(schema).map(lambda body: body | ({"model": model} if "model" in body else {}))
    wrong = st.builds(_bent, right, st.integers(0, 1000), ANY_JSON, _TEXT)
    written = st.one_of(right, wrong, wrong, ANY_JSON).map(lambda body: json.dumps(body).encode())
    cut = st.tuples(written, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]])
    return st.one_of(written, written, written, cut, _RAW)


def _bent(body: dict[str, Any], which: int, value: Any, name: str) -> dict[str, Any]:
    """One field replaced, dropped, or added."""
    names = sorted(body)
    kind, place = which % 4, names[which % len(names)] if names else name
    if kind == 0:
        return {key: item for key, item in body.items() if key != place}
    return body | {(name if kind == 1 else place): value}


def from_schema(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that fit the schema, for the keywords this server's document uses."""
    if "anyOf" in schema:
        return st.one_of([from_schema(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        return _objects(schema)
    if kind == "array":
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), least + 2)
        return st.lists(from_schema(schema.get("items", {})), min_size=least, max_size=most)
    if kind == "integer":
        low, high = schema.get("minimum", -5), schema.get("maximum", 50)
        return st.one_of(st.integers(low, min(high, low + 40)), st.sampled_from([low, high]))
    if kind == "number":
        low, high = schema.get("minimum", -1), schema.get("maximum", 1)
        return st.floats(low, high, allow_nan=False)
    if kind == "string":
        return st.text(min_size=schema.get("minLength", 0), max_size=min(8, schema.get("maxLength", 8)))
    return {"boolean": st.booleans(), "null": st.none()}.get(str(kind), ANY_JSON)


def _objects(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    properties = schema.get("properties", {})
    if not properties:
        others = schema.get("additionalProperties")
        values = from_schema(others) if isinstance(others, Mapping) else ANY_JSON
        return st.dictionaries(st.text(max_size=6), values, max_size=2)
    required = set(schema.get("required", ()))
    optional = {name: from_schema(value) for name, value in properties.items() if name not in required}
    must = st.fixed_dictionaries({name: from_schema(properties[name]) for name in sorted(required)})
    if not optional:
        return must
    some = st.sets(st.sampled_from(sorted(optional)), max_size=4)
    may = some.flatmap(lambda names: st.fixed_dictionaries({name: optional[name] for name in sorted(names)}))
    return st.builds(lambda first, second: first | second, must, may)
