"""Which requests can run at all. What can never be served is refused before it queues."""

from __future__ import annotations

from collections.abc import Collection

from engine.errors import RequestRefused
from engine.types import BASELINE, EngineRequest, SamplingParams


def check_request(
    request: EngineRequest, vocab_size: int, max_model_len: int, methods: Collection[str]
) -> None:
    """Raises RequestRefused naming the field at fault and what would do instead."""
    prompt = request.prompt_token_ids
    params = request.sampling
    if not prompt:
        raise RequestRefused("the prompt is empty; it needs at least one token", "prompt")
    if len(prompt) + min(params.max_tokens, 1) > max_model_len:
        raise RequestRefused(
            f"the prompt has {len(prompt)} tokens; with one more to generate that is above the "
            f"context of {max_model_len} tokens",
            "prompt",
        )
    _check_ids(prompt, vocab_size, "prompt")
    _check_ids(params.logit_bias, vocab_size, "logit_bias")
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_sampling(params)
    policy = request.policy
    if policy.method != BASELINE and policy.method not in methods:
        loaded = ", ".join([BASELINE, *sorted(methods)])
        raise RequestRefused(f"policy {policy.method!r} is not loaded here; use one of {loaded}", "policy")
    if policy.num_speculative_tokens < 0:
        raise RequestRefused("must be 0 or more", "num_speculative_tokens")


def _check_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestRefused(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param)


def _check_sampling(params: SamplingParams) -> None:
    """Values that no sampler has a meaning for; ranges of taste are the caller's business."""
    rules = (
        ("max_tokens", params.max_tokens >= 0, "must be 0 or more"),
        ("min_tokens", params.min_tokens >= 0, "must be 0 or more"),
        ("temperature", 0.0 <= params.temperature < float("inf"), "must be a finite number, 0 or more"),
        ("top_p", 0.0 < params.top_p <= 1.0, "must be above 0 and at most 1"),
        ("top_k", params.top_k >= 0, "must be 0 (off) or more"),
        ("min_p", 0.0 <= params.min_p <= 1.0, "must be between 0 and 1"),
        ("repetition_penalty", 1e-6 <= params.repetition_penalty <= 1e6, "must be between 1e-6 and 1e6"),
        ("logprobs", params.num_logprobs is None or params.num_logprobs >= 0, "must be 0 or more"),
    )
    for param, is_valid, message in rules:
        if not is_valid:
            raise RequestRefused(f"{param} {message}", param)
