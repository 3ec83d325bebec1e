"""Bytes in, `GenerationRequest` out: every fault is a 400 that names the field.

Pure functions of the body, the policy header and the limits; nothing here looks at a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engine.types import SamplingParams
from specgate.api.jsoncheck import check, shown
from specgate.api.schema import UNSUPPORTED, chat_schema, completions_schema
from specgate.api.structured import response_format_of, tool_choice_of, tools_of
from specgate.config import RequestsConfig
from specgate.errors import BadRequest, ContextTooLong, Forbidden, UnsupportedParameter
from specgate.types import GenerationRequest, Overrides

POLICY_HEADER = "X-SpecGate-Policy"
_POLICY_NAME = re.compile(r"[a-z0-9_.-]{1,64}")
_COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for the legacy endpoint
_Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """What the HTTP layer knows of a request beside its body."""

    request_id: str
    tenant: str = ""
    policy_header: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # those that rollouts look at; lower case
    priority: int = 0  # of its key
    raw: bytes = b""  # the body as it came


def decode_json(data: bytes, max_depth: int) -> dict[str, Any]:
    """The body as an object. Raises BadRequest for anything else, including NaN, lone surrogates,
    numbers beyond a double and nesting deeper than `max_depth`."""
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise BadRequest(f"The body is nested deeper than {max_depth} levels.") from None
    except msgspec.MsgspecError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The body is {shown(body)}; it must be a JSON object.")
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return body
    level: list[Any] = [body]
    for _ in range(max_depth):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return body
    raise BadRequest(f"The body is nested deeper than {max_depth} levels.")


class Parser:
    """The two generating endpoints' bodies, under the configured limits."""

    def __init__(self, limits: RequestsConfig) -> None:
        self._limits = limits
        self._chat_schema = chat_schema(limits)
        self._completions_schema = completions_schema(limits)

    def chat(self, body: _Fields, caller: Caller) -> GenerationRequest:
        """A body of /v1/chat/completions."""
        check(body, self._chat_schema)
        fields = {name: value for name, value in body.items() if value is not None}
        if "top_logprobs" in fields and not fields.get("logprobs"):
            raise BadRequest("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        num_logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
        max_tokens = _chat_max_tokens(fields)
        tools = tools_of(fields, self._limits.max_schema_bytes)
        messages = tuple(_message(m, i) for i, m in enumerate(fields["messages"]))
        _check_length(sum(len(m["content"]) for m in messages), "messages", self._limits.max_prompt_chars)
        return replace(
            self._request("chat", fields, caller, _sampling(fields, max_tokens, num_logprobs)),
            messages=messages,
            tools=tools,
            tool_choice=tool_choice_of(fields, tools),
            response_format=response_format_of(fields, self._limits.max_schema_bytes),
            chat_template_kwargs=fields.get("chat_template_kwargs", {}),
            has_explicit_max_tokens=max_tokens is not None,
        )

    def completions(self, body: _Fields, caller: Caller) -> GenerationRequest:
        """A body of /v1/completions. A list of prompts gives `prompt` and `more_prompts`."""
        check(body, self._completions_schema)
        fields = {name: value for name, value in body.items() if value is not None}
        prompts = prompts_of(fields["prompt"])
        _check_length(max(map(len, prompts)), "prompt", self._limits.max_prompt_chars)
        max_tokens = fields.get("max_tokens", _COMPLETIONS_MAX_TOKENS)
        sampling = _sampling(fields, max_tokens, fields.get("logprobs"))
        has_echo = bool(fields.get("echo", False))
        return replace(
            self._request("completions", fields, caller, sampling),
            sampling=replace(sampling, has_prompt_logprobs=has_echo and "logprobs" in fields),
            prompt=prompts[0],
            more_prompts=prompts[1:],
            suffix=fields.get("suffix"),
            has_echo=has_echo,
            has_explicit_max_tokens="max_tokens" in fields,
        )

    def _request(
        self, endpoint: str, fields: _Fields, caller: Caller, sampling: SamplingParams
    ) -> GenerationRequest:
        is_stream = bool(fields.get("stream", False))
        options = fields.get("stream_options")
        if options is not None and not is_stream:
            raise BadRequest("'stream_options' needs 'stream' to be true.", "stream_options")
        has_trace = bool(fields.get("specgate", {}).get("trace"))
        if has_trace and not is_stream:
            raise BadRequest("'specgate.trace' needs 'stream' to be true.", "specgate.trace")
        stop = fields.get("stop", ())
        return GenerationRequest(
            request_id=caller.request_id,
            endpoint=endpoint,
            model=fields["model"],
            sampling=sampling,
            n=fields.get("n", 1),
            stop=(stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop)),
            is_stream=is_stream,
            has_usage=bool(options and options.get("include_usage")),
            overrides=self._overrides(fields.get("specgate", {}), caller.policy_header),
            unsupported=tuple(name for name in fields if name in UNSUPPORTED and _changes(name, fields)),
            tenant=caller.tenant,
            user=fields.get("user", ""),
            has_trace=has_trace,
            headers=caller.headers,
            priority=priority_of(fields, caller.priority),
        )

    def _overrides(self, body: _Fields, header: str | None) -> Overrides:
        """The header wins over the body: it is what a proxy or an operator adds."""
        policy, source = body.get("policy"), "specgate.policy"
        if header is not None:
            policy, source = header.strip().lower(), POLICY_HEADER
        if policy is not None and not _POLICY_NAME.fullmatch(policy):
            raise BadRequest(f"{source!r} is {shown(policy)}, which is no policy's name.", source)
        depth, task = body.get("num_speculative_tokens"), body.get("task")
        if policy == "auto":
            policy = None
        if not self._limits.allow_overrides:
            asked = {source: policy, "specgate.num_speculative_tokens": depth, "specgate.task": task}
            for name, value in asked.items():
                if value is not None:
                    raise Forbidden(f"{name!r} is not allowed here: requests.allow_overrides is off.", name)
        if policy == "baseline" and depth:
            raise BadRequest(
                f"'specgate.num_speculative_tokens' is {depth}, but baseline means zero draft tokens.",
                "specgate.num_speculative_tokens",
            )
        slo = body.get("slo") or {}
        explore, learn = body.get("explore"), body.get("learn")
        return Overrides(
            policy=policy,
            num_speculative_tokens=depth,
            task=task,
            objective=body.get("objective"),
            slo_ttft_ms=slo.get("ttft_ms"),
            slo_tpot_ms=slo.get("tpot_ms"),
            explore=True if explore is None else explore,
            learn=True if learn is None else learn,
        )


def _sampling(fields: _Fields, max_tokens: int | None, num_logprobs: int | None) -> SamplingParams:
    """`max_tokens` None: as far as the context goes, which the pipeline fills in."""
    min_tokens = fields.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(
            f"'min_tokens' is {min_tokens}, above the {max_tokens} tokens allowed.", "min_tokens"
        )
    top_p, top_k = float(fields.get("top_p", 1.0)), max(0, fields.get("top_k", 0))
    if top_p == 0.0:  # a nucleus of no mass still holds the best token
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=float(fields.get("temperature", 1.0)),
        top_p=top_p,
        top_k=top_k,
        min_p=float(fields.get("min_p", 0.0)),
        repetition_penalty=float(fields.get("repetition_penalty", 1.0)),
        presence_penalty=float(fields.get("presence_penalty", 0.0)),
        frequency_penalty=float(fields.get("frequency_penalty", 0.0)),
        logit_bias=_logit_bias(fields.get("logit_bias", {})),
        seed=fields["seed"] % 2**63 if "seed" in fields else None,  # noise keys are not negative
        num_logprobs=num_logprobs,
        max_tokens=max_tokens if max_tokens is not None else 2**31 - 1,
        min_tokens=min_tokens,
        stop_token_ids=tuple(dict.fromkeys(fields.get("stop_token_ids", ()))),
        ignore_eos=fields.get("ignore_eos", False),
    )


def _logit_bias(raw: _Fields) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"'logit_bias' has the key {shown(key)}; keys are token ids.", "logit_bias")
        bias[int(key)] = float(value)
    return bias


def _check_length(num_chars: int, name: str, most: int) -> None:
    """What is far too long is not encoded to find out by how much."""
    if num_chars > most:
        raise ContextTooLong(f"{name!r} has {num_chars} characters; at most {most} characters fit.", name)


def priority_of(fields: _Fields, own: int) -> int:
    """Smaller is served first. Nobody gets ahead of their key's place by asking."""
    asked: int = fields.get("priority", own)
    if asked < own:
        raise Forbidden(
            f"'priority' is {asked}; yours is {own}: only a greater number, served later, may be asked for.",
            "priority",
        )
    return asked


def _chat_max_tokens(fields: _Fields) -> int | None:
    old, new = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise BadRequest("'max_tokens' and 'max_completion_tokens' differ; give one.", "max_tokens")
    return new if new is not None else old


def prompts_of(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """One or several prompts, each text or token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompt)


def _message(message: _Fields, index: int) -> dict[str, Any]:
    """A message for the chat template: text parts joined, nulls gone, `developer` as `system`."""
    at = f"messages[{index}]"
    out = {key: value for key, value in message.items() if value is not None}
    for name in ("audio", "function_call"):
        if name in out:
            raise UnsupportedParameter(f"'{at}.{name}' is not supported.", f"{at}.{name}")
    for name in ("annotations", "parsed"):  # said about an earlier answer; templates have no use for it
        out.pop(name, None)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    content = out.get("content")
    if content is None and not (out["role"] == "assistant" and (out.get("tool_calls") or "refusal" in out)):
        raise BadRequest(f"'{at}.content' is required.", f"{at}.content", code="missing_required_parameter")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    refusal = out.pop("refusal", None)
    out["content"] = content if content is not None else refusal or ""
    if out["role"] == "developer":
        out["role"] = "system"
    return out


def _call(call: _Fields, at: str) -> dict[str, Any]:
    """An earlier call as templates know it."""
    if call.get("type", "function") != "function" or call.get("custom") is not None:
        raise UnsupportedParameter(f"'{at}': only calls of functions are supported.", at)
    function = {name: value for name, value in call["function"].items() if name in ("name", "arguments")}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _part(part: _Fields, at: str) -> str:
    kind = part["type"]
    if kind not in ("text", "refusal"):
        raise UnsupportedParameter(
            f"'{at}.type' is {shown(kind)}; only text parts are supported.", f"{at}.type"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise BadRequest(f"'{at}.{kind}' is required.", f"{at}.{kind}", code="missing_required_parameter")
    return text


def _changes(name: str, fields: _Fields) -> bool:
    """Whether this value of an unsupported field would change the answer."""
    value = fields[name]
    if name in ("functions", "suffix"):
        return len(value) > 0
    if name == "function_call":
        return value not in ("none", "auto") or bool(fields.get("functions"))
    if name == "modalities":
        return bool(value != ["text"])
    if name == "best_of":
        return bool(value != fields.get("n", 1))
    return True
