"""The `usage` and `specgate` objects of an answer: true counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from specgate.generation import Generation
from specgate.telemetry.decision_log import timings_ms
from specgate.types import Decision


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's shape. Prompts count once, however many answers they get."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    cached = [
        next((a.stats.num_cached_tokens for a in answers if a.stats is not None), 0)
        for answers in generation.answers_by_prompt()
    ]
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }


def specgate_object(generation: Generation) -> dict[str, Any]:
    """What was decided, what it did, what was expected, and what it cost."""
    decision = generation.decision
    stats = [answer.stats for answer in generation.answers if answer.stats is not None]
    num_drafts = sum(s.num_drafts for s in stats)
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    return {
        "policy": decision.policy,
        "reason": decision.reason,
        "task": decision.task.label,
        "arm": decision.arm,
        "rollout": decision.rollout,
        "num_drafts": num_drafts,
        "num_draft_tokens": sum(s.num_draft_tokens for s in stats),
        "num_accepted_tokens": num_accepted,
        "num_target_steps": sum(s.num_target_steps for s in stats),
        "accepted_per_position": _by_position(s.accepted_per_position for s in stats),
        "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
        "predicted": decision.predicted,
        "timings": timings_ms(generation.timings()),
        "policy_changes": [change for s in stats for change in s.policy_changes],
        "costs": generation.cost(),
    }


def _by_position(counts: Iterable[tuple[int, ...]]) -> list[int]:
    """Accepted draft tokens by depth, summed over the answers."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def decision_headers(decision: Decision) -> Mapping[str, str]:
    """The contract's response headers."""
    headers = {
        "X-SpecGate-Policy": decision.policy,
        "X-SpecGate-Reason": decision.reason,
        "X-SpecGate-Task": decision.task.label,
    }
    return headers | ({"X-SpecGate-Arm": decision.arm} if decision.arm is not None else {})
