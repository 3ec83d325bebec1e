"""Requests to models that other servers run: what the gateway needs is read, all else is theirs to judge.

A name that is unknown here is passed on, not refused; so are tools, response formats, images and values
out of OpenAI's ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.types import SamplingParams
from specgate.api.jsoncheck import check
from specgate.api.parse import Caller, Parser, priority_of, prompts_of
from specgate.api.schema import SPECGATE, JsonSchema
from specgate.config import RequestsConfig
from specgate.errors import UnsupportedParameter
from specgate.types import GenerationRequest

_TOKENS: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_NOT_NEGATIVE: JsonSchema = {"type": "number", "minimum": 0}
_NO_LIMIT = 2**31 - 1


class RelayParser(Parser):
    """In the place of `Parser`, for such models."""

    def __init__(self, limits: RequestsConfig) -> None:
        super().__init__(limits)
        common: JsonSchema = {
            "model": {"type": "string", "minLength": 1},
            "stream": {"type": "boolean"},
            "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
            "n": {"type": "integer", "minimum": 1, "maximum": limits.max_n},
            "max_tokens": {"type": "integer", "minimum": 0, "maximum": _NO_LIMIT},
            "max_completion_tokens": {"type": "integer", "minimum": 0, "maximum": _NO_LIMIT},
            "temperature": _NOT_NEGATIVE,
            "top_p": _NOT_NEGATIVE,
            "priority": {"type": "integer"},
            "specgate": SPECGATE,
        }
        messages: JsonSchema = {
            "type": "array",
            "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
            "minItems": 1,
        }
        prompt: JsonSchema = {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": limits.max_prompts},
                _TOKENS | {"minItems": 1},
                {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": limits.max_prompts},
            ]
        }
        self._relay_chat = _open(common | {"messages": messages}, "model", "messages")
        self._relay_completions = _open(common | {"prompt": prompt}, "model", "prompt")

    def chat(self, body: Mapping[str, Any], caller: Caller) -> GenerationRequest:
        """A body of /v1/chat/completions."""
        check(body, self._relay_chat)
        tools, form = body.get("tools"), body.get("response_format")
        return self._relayed(
            "chat",
            body,
            caller,
            messages=tuple(body["messages"]),
            tools=tuple(tools) if isinstance(tools, list) else (),
            response_format=form if isinstance(form, dict) else None,
        )

    def completions(self, body: Mapping[str, Any], caller: Caller) -> GenerationRequest:
        """A body of /v1/completions."""
        check(body, self._relay_completions)
        prompts = prompts_of(body["prompt"])
        suffix = body.get("suffix")
        return self._relayed(
            "completions",
            body,
            caller,
            prompt=prompts[0],
            more_prompts=prompts[1:],
            suffix=suffix if isinstance(suffix, str) else None,
        )

    def _relayed(
        self, endpoint: str, body: Mapping[str, Any], caller: Caller, **shape: Any
    ) -> GenerationRequest:
        fields = {name: value for name, value in body.items() if value is not None}
        own = fields.get("specgate", {})
        if own.get("num_speculative_tokens"):
            name = "specgate.num_speculative_tokens"
            raise UnsupportedParameter(f"{name!r} cannot be set: these servers draft as they do.", name)
        max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
        user = fields.get("user", "")
        return GenerationRequest(
            request_id=caller.request_id,
            endpoint=endpoint,
            model=fields["model"],
            sampling=SamplingParams(
                temperature=float(fields.get("temperature", 1.0)),
                top_p=float(fields.get("top_p", 1.0)),
                seed=0 if "seed" in fields else None,
                max_tokens=_NO_LIMIT if max_tokens is None else max_tokens,
                ignore_eos=fields.get("ignore_eos") is True,
            ),
            n=fields.get("n", 1),
            is_stream=fields.get("stream", False),
            has_usage=fields.get("stream_options", {}).get("include_usage") is True,
            has_explicit_max_tokens=max_tokens is not None,
            overrides=self._overrides(own, caller.policy_header),
            tenant=caller.tenant,
            user=user if isinstance(user, str) else "",
            headers=caller.headers,
            priority=priority_of(fields, caller.priority),
            raw=caller.raw,
            **shape,
        )


def _open(properties: JsonSchema, *required: str) -> JsonSchema:
    return {"type": "object", "properties": properties, "required": list(required)}
