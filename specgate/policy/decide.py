"""Which policy a request runs under, and why. Pure: facts and rules in, decision out.

Precedence: kill switch > parameters that speculation cannot serve > override > load guards > rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.types import BASELINE
from specgate.config.schema import PolicyConfig
from specgate.policy.reasons import Reason
from specgate.types import Candidate, Decision, LengthEstimate, LoadView, Overrides, Prediction, TaskEstimate

NGRAM, DRAFT = "ngram", "draft"


@dataclass(frozen=True, slots=True)
class Facts:
    """All a decision may depend on."""

    task: TaskEstimate
    length: LengthEstimate
    load: LoadView
    methods: Mapping[str, int]  # loaded methods and their default depth; baseline is not listed
    acceptance_p50: Mapping[str, float] = field(
        default_factory=dict
    )  # by method, for this task; absent: no data
    overrides: Overrides = field(default_factory=Overrides)
    forced: str | None = None  # the kill switch
    baseline_only: tuple[str, ...] = ()  # parameters of the request that speculation cannot serve
    unsupported: tuple[str, ...] = ()  # parameters nothing can generate with: the request will be refused


@dataclass(frozen=True, slots=True)
class _Choice:
    policy: str
    reason: Reason
    closed: str  # why the other candidates are closed


def decide(facts: Facts, rules: PolicyConfig) -> Decision:
    """The policy for one request. Total: there is always an answer, and a reason for it."""
    choice = (
        _forced(facts)
        or _parameters(facts)
        or _override(facts)
        or _load(facts.load, rules)
        or _rule(facts, rules)
    )
    depth = _depth(choice.policy, facts)
    return Decision(
        policy=choice.policy,
        reason=choice.reason.value,
        num_speculative_tokens=depth,
        is_exact=_is_exact(choice, facts),
        task=facts.task,
        length=facts.length,
        load=facts.load,
        predicted=Prediction(output_tokens=facts.length.p50),
        candidates=tuple(_candidate(p, choice, facts, rules) for p in (BASELINE, *facts.methods)),
    )


def unknown_policy(overrides: Overrides, methods: Mapping[str, int]) -> str | None:
    """What is wrong with the override, or None. `methods` are those loaded beside baseline."""
    if overrides.policy is None or overrides.policy == BASELINE or overrides.policy in methods:
        return None
    loaded = ", ".join(("auto", BASELINE, *methods))
    return f"policy {overrides.policy!r} is not loaded; loaded: {loaded}."


def _forced(facts: Facts) -> _Choice | None:
    if facts.forced is None:
        return None
    return _Choice(facts.forced, Reason.KILL_SWITCH, f"kill switch: {facts.forced} is forced")


def _parameters(facts: Facts) -> _Choice | None:
    names = facts.unsupported or facts.baseline_only
    if not names:
        return None
    return _Choice(BASELINE, Reason.UNSUPPORTED_PARAMS, f"unsupported_params: {', '.join(names)}")


def _override(facts: Facts) -> _Choice | None:
    asked = facts.overrides.policy
    if facts.overrides.num_speculative_tokens == 0 and asked is None:
        asked = BASELINE
    if asked is None or unknown_policy(facts.overrides, facts.methods):
        return None
    return _Choice(asked, Reason.OVERRIDE, f"override: {asked} was asked for")


def _load(load: LoadView, rules: PolicyConfig) -> _Choice | None:
    wait, wait_limit = load.queue_wait_p95_ms, rules.max_queue_wait_p95_ms
    if wait is not None and wait_limit is not None and wait > wait_limit:
        closed = f"queue_wait_guard: queue wait p95 {wait:.0f} ms is above {wait_limit:.0f} ms"
        return _Choice(BASELINE, Reason.QUEUE_WAIT_GUARD, closed)
    rate, rate_limit = load.requests_per_s, rules.max_requests_per_s
    if rate_limit is not None and rate > rate_limit:
        closed = f"load_guard: {rate:.1f} requests/s are above {rate_limit:g}"
        return _Choice(BASELINE, Reason.LOAD_GUARD, closed)
    return None


def _rule(facts: Facts, rules: PolicyConfig) -> _Choice:
    for policy in (NGRAM, DRAFT):
        if _rule_refusal(policy, facts, rules) is None:
            return _Choice(policy, Reason.RULE, f"rule: {policy} was chosen")
    return _Choice(BASELINE, Reason.RULE, "rule: no method fits this request")


def _rule_refusal(policy: str, facts: Facts, rules: PolicyConfig) -> str | None:
    """Why the rules do not choose `policy`, or None if they do."""
    if policy not in facts.methods:
        return f"rule: {policy} is not loaded"
    if policy == NGRAM:
        if facts.task.label in rules.ngram_tasks:
            return None
        return f"rule: ngram is for {', '.join(rules.ngram_tasks)}; this is {facts.task.label}"
    if policy == DRAFT:
        if facts.length.p50 <= rules.draft_min_output_tokens:
            return (
                f"rule: draft needs more than {rules.draft_min_output_tokens} expected tokens; "
                f"expected are {facts.length.p50:.0f}"
            )
        acceptance = facts.acceptance_p50.get(DRAFT)
        if acceptance is None:
            return f"rule: no acceptance of draft on {facts.task.label} was measured yet"
        if acceptance <= rules.draft_min_acceptance:
            return f"rule: acceptance p50 {acceptance:.2f} is not above {rules.draft_min_acceptance}"
        return None
    return f"rule: no rule for {policy}; ask for it by name"


def _candidate(policy: str, choice: _Choice, facts: Facts, rules: PolicyConfig) -> Candidate:
    """A candidate is allowed unless something forbids it. That the rules prefer another forbids
    nothing; `why_not` then says why they do."""
    refused = unknown_policy(facts.overrides, facts.methods)
    is_refused = bool(facts.unsupported) or refused is not None
    if facts.unsupported:
        why: str | None = f"unsupported_params: {', '.join(facts.unsupported)}"
    elif refused is not None:
        why = refused
    elif policy == choice.policy:
        why = None
    elif choice.reason is Reason.RULE and policy != BASELINE:
        why = _rule_refusal(policy, facts, rules) or choice.closed
    else:
        why = choice.closed
    return Candidate(
        policy=policy,
        num_speculative_tokens=_depth(policy, facts),
        is_allowed=why is None or (choice.reason is Reason.RULE and not is_refused),
        why_not=why,
        predicted=Prediction(output_tokens=facts.length.p50),
    )


def _depth(policy: str, facts: Facts) -> int:
    if policy == BASELINE:
        return 0
    asked = facts.overrides.num_speculative_tokens
    return facts.methods.get(policy, 0) if asked is None else asked


def _is_exact(choice: _Choice, facts: Facts) -> bool:
    if choice.reason is Reason.OVERRIDE:
        return True
    return choice.policy != BASELINE and facts.overrides.num_speculative_tokens is not None
