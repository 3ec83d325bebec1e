"""The rule policy: which tasks get which drafter, for want of anything better. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from engine.types import BASELINE
from specgate.config.schema import PolicyConfig
from specgate.types import LengthEstimate, TaskEstimate

NGRAM, DRAFT = "ngram", "draft"


def rule_policy(
    task: TaskEstimate,
    length: LengthEstimate,
    acceptance_p50: Mapping[str, float],
    rules: PolicyConfig,
    methods: Mapping[str, int],
) -> str:
    """The first drafter that the rules do not refuse, else baseline. `methods` are those to choose from."""
    for policy in (NGRAM, DRAFT):
        if rule_refusal(policy, task, length, acceptance_p50, rules, methods) is None:
            return policy
    return BASELINE


def rule_refusal(
    policy: str,
    task: TaskEstimate,
    length: LengthEstimate,
    acceptance_p50: Mapping[str, float],
    rules: PolicyConfig,
    methods: Mapping[str, int],
) -> str | None:
    """Why the rules do not choose `policy`, or None if they do."""
    if policy not in methods:
        return f"rule: {policy} is not loaded"
    if policy == NGRAM:
        if task.label in rules.ngram_tasks:
            return None
        return f"rule: ngram is for {', '.join(rules.ngram_tasks)}; this is {task.label}"
    if policy == DRAFT:
        if length.p50 <= rules.draft_min_output_tokens:
            return (
                f"rule: draft needs more than {rules.draft_min_output_tokens} expected tokens; "
                f"expected are {length.p50:.0f}"
            )
        acceptance = acceptance_p50.get(DRAFT)
        if acceptance is None:
            return f"rule: no acceptance of draft on {task.label} was measured yet"
        if acceptance <= rules.draft_min_acceptance:
            return f"rule: acceptance p50 {acceptance:.2f} is not above {rules.draft_min_acceptance}"
        return None
    return f"rule: no rule for {policy}; ask for it by name"
