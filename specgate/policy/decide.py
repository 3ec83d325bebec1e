"""Which policy a request runs under, and why. Pure: facts and rules in, decision out.

Precedence: kill switch > parameters that speculation cannot serve > memory and drafter-error guards
> override > an arm of a rollout > other guards > what is predicted to be best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.types import BASELINE
from router_models.types import Quantiles
from specgate.config.schema import PolicyConfig
from specgate.policy.reasons import Reason
from specgate.policy.rules import rule_policy, rule_refusal
from specgate.policy.score import Option, Scoring, exploration, options_of, why_not_best
from specgate.policy.shut import Shut
from specgate.policy.view import ModelView
from specgate.types import Candidate, Decision, LengthEstimate, LoadView, Overrides, Prediction, TaskEstimate

SHORT_TOKENS = 3.0  # answers that are this short with 90 % are over before a drafter has paid


@dataclass(frozen=True, slots=True)
class Experience:
    """What was learned of the served model, and what trying more may cost."""

    view: ModelView = field(default_factory=ModelView)
    ttft: Quantiles | None = None  # in seconds; None: not learned yet
    acceptance_p50: Mapping[str, float] = field(default_factory=dict)  # by method, for this task
    incumbent: str | None = None  # the policy last chosen for this task
    explore_credit_s: float = 0.0
    min_steps: int = 40  # decode steps before predictions are believed
    min_drafting_steps: int = 32  # granted steps before a drafter is judged


@dataclass(frozen=True, slots=True)
class Facts:
    """All a decision may depend on."""

    task: TaskEstimate
    length: LengthEstimate
    load: LoadView
    methods: Mapping[str, int]  # loaded methods and their default depth; baseline is not listed
    num_prompt_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    known: Experience = field(default_factory=Experience)
    overrides: Overrides = field(default_factory=Overrides)
    forced: str | None = None  # the kill switch
    pinned: str | None = None  # the one policy of this arm of a rollout
    shut: Mapping[str, Shut] = field(default_factory=dict)  # by policy: what the guards have closed
    baseline_only: tuple[str, ...] = ()  # parameters of the request that speculation cannot serve
    unsupported: tuple[str, ...] = ()  # parameters nothing can generate with: the request will be refused


@dataclass(frozen=True, slots=True)
class _Choice:
    policy: str
    reason: Reason
    closed: str  # why the other candidates are closed
    is_preference: bool = False  # nothing forbids the others
    hold_steps: int = 0
    explore_cost_s: float = 0.0


def decide(facts: Facts, rules: PolicyConfig) -> Decision:
    """The policy for one request. Total: there is always an answer, and a reason for it."""
    scoring = _scoring(facts, rules)
    options = options_of(scoring)
    choice = (
        _forced(facts)
        or _parameters(facts)
        or _override(facts)
        or _pinned(facts)
        or _all_shut(facts)
        or _short(facts)
        or _rule(facts, rules)
        or _best(facts, rules, scoring, options)
    )
    depth = _depth(choice.policy, facts, options)
    chosen = options.get(choice.policy)
    predicted = chosen.forecast.predicted if chosen is not None and chosen.forecast is not None else None
    return Decision(
        policy=choice.policy,
        reason=choice.reason.value,
        num_speculative_tokens=depth,
        is_exact=_is_exact(choice, facts),
        task=facts.task,
        length=facts.length,
        load=facts.load,
        predicted=predicted or Prediction(output_tokens=facts.length.p50),
        candidates=tuple(
            _candidate(policy, choice, facts, rules, options) for policy in (BASELINE, *facts.methods)
        ),
        hold_steps=choice.hold_steps,
        explore_cost_s=choice.explore_cost_s,
    )


def unknown_policy(overrides: Overrides, methods: Mapping[str, int]) -> str | None:
    """What is wrong with the override, or None. `methods` are those loaded beside baseline."""
    if overrides.policy is None or overrides.policy == BASELINE or overrides.policy in methods:
        return None
    loaded = ", ".join(("auto", BASELINE, *methods))
    return f"policy {overrides.policy!r} is not loaded; loaded: {loaded}."


def is_cold(known: Experience) -> bool:
    """True while too few steps were seen for predictions to mean anything."""
    step = known.view.step
    return step is None or step.num_steps < known.min_steps


def _scoring(facts: Facts, rules: PolicyConfig) -> Scoring:
    asked, load = facts.overrides, facts.load
    return Scoring(
        view=facts.known.view,
        task=None if facts.task.is_mixed else facts.task.label,
        temperature=facts.temperature,
        top_p=facts.top_p,
        prompt_tokens=facts.num_prompt_tokens,
        output_tokens=facts.length.p50,
        batch=max(1 + load.num_running + load.num_waiting, load.num_admitted),
        ttft=facts.known.ttft,
        methods=facts.methods,
        fixed_depth=asked.num_speculative_tokens,
        min_drafting_steps=facts.known.min_drafting_steps,
        objective=asked.objective or rules.objective,
        slo_ttft_ms=asked.slo_ttft_ms if asked.slo_ttft_ms is not None else rules.slo_ttft_ms,
        slo_tpot_ms=asked.slo_tpot_ms if asked.slo_tpot_ms is not None else rules.slo_tpot_ms,
    )


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
    return _hard(facts, asked) or _Choice(asked, Reason.OVERRIDE, f"override: {asked} was asked for")


def _pinned(facts: Facts) -> _Choice | None:
    if facts.pinned is None or facts.pinned not in (BASELINE, *facts.methods):
        return None
    return _hard(facts, facts.pinned) or _Choice(
        facts.pinned, Reason.RULE, f"rule: this arm of a rollout always runs {facts.pinned}"
    )


def _hard(facts: Facts, policy: str) -> _Choice | None:
    """What keeps even a policy that was asked for by name from running."""
    shut = facts.shut.get(policy)
    return _Choice(BASELINE, shut.reason, shut.why) if shut is not None and shut.is_hard else None


def _all_shut(facts: Facts) -> _Choice | None:
    """Nothing is left to choose from."""
    if not facts.methods or any(method not in facts.shut for method in facts.methods):
        return None
    first = facts.shut[next(iter(facts.methods))]
    return _Choice(BASELINE, first.reason, first.why)


def _short(facts: Facts) -> _Choice | None:
    if facts.length.p90 > SHORT_TOKENS:
        return None
    closed = f"short_output: at most {facts.length.p90:.0f} tokens are expected (90 %)"
    return _Choice(BASELINE, Reason.SHORT_OUTPUT, closed, is_preference=True)


def _rule(facts: Facts, rules: PolicyConfig) -> _Choice | None:
    """The rules, where they are asked for or nothing else is there yet."""
    if rules.router == "model" and not is_cold(facts.known):
        return None
    reason = Reason.COLD_START if rules.router == "model" else Reason.RULE
    open_methods = {m: depth for m, depth in facts.methods.items() if m not in facts.shut}
    wanted, policy = (
        rule_policy(facts.task, facts.length, facts.known.acceptance_p50, rules, methods)
        for methods in (facts.methods, open_methods)
    )
    if wanted in facts.shut:
        return _Choice(policy, facts.shut[wanted].reason, f"rule: {policy} is left", is_preference=True)
    if policy == BASELINE:
        return _Choice(BASELINE, reason, "rule: no method fits this request", is_preference=True)
    return _Choice(policy, reason, f"rule: {policy} was chosen", is_preference=True)


def _best(facts: Facts, rules: PolicyConfig, scoring: Scoring, options: Mapping[str, Option]) -> _Choice:
    """What is predicted to be best among what is allowed and known well enough."""
    proven = {policy: option for policy, option in options.items() if option.is_proven}
    allowed = {policy: option for policy, option in proven.items() if policy not in facts.shut}
    best = scoring.best(allowed, facts.known.incumbent, rules.switch_margin)
    closed = f"predicted_fastest: {best.policy}, {best.tells(scoring.objective)}"
    may_explore = facts.overrides.explore and facts.overrides.num_speculative_tokens is None
    if may_explore and facts.known.explore_credit_s > 0:
        trial = exploration(
            best,
            [o for p, o in options.items() if p not in facts.shut],
            scoring,
            facts.known.explore_credit_s,
        )
        if trial is not None:
            text = f"exploration: {trial.policy} is tried, too little is known of its yield"
            return _Choice(trial.policy, Reason.EXPLORATION, text, True, trial.hold_steps, trial.cost_s)
    wanted = scoring.best(proven, best.policy, 0.0)
    if wanted.policy in facts.shut:
        return _Choice(best.policy, facts.shut[wanted.policy].reason, closed, is_preference=True)
    return _Choice(best.policy, Reason.PREDICTED_FASTEST, closed, is_preference=True)


def _candidate(
    policy: str, choice: _Choice, facts: Facts, rules: PolicyConfig, options: Mapping[str, Option]
) -> Candidate:
    """A candidate is allowed unless something forbids it. That another is preferred forbids
    nothing; `why_not` then says why it is."""
    refused = unknown_policy(facts.overrides, facts.methods)
    option = options.get(policy)
    shut = facts.shut.get(policy) if policy != choice.policy else None
    why: str | None = choice.closed
    is_allowed = choice.is_preference
    if facts.unsupported:
        why, is_allowed = f"unsupported_params: {', '.join(facts.unsupported)}", False
    elif refused is not None:
        why, is_allowed = refused, False
    elif policy == choice.policy:
        why, is_allowed = None, True
    elif shut is not None and (choice.is_preference or shut.is_hard or shut.reason is choice.reason):
        why, is_allowed = shut.why, False
    elif choice.reason in (Reason.RULE, Reason.COLD_START) and policy != BASELINE:
        why = rule_refusal(
            policy, facts.task, facts.length, facts.known.acceptance_p50, rules, facts.methods
        ) or choice.closed  # fmt: skip
    elif choice.reason is Reason.PREDICTED_FASTEST and option is not None:
        why = why_not_best(
            option, options[choice.policy], facts.overrides.objective or rules.objective, choice.closed
        )
    forecast = option.forecast if option is not None else None
    return Candidate(
        policy=policy,
        num_speculative_tokens=_depth(policy, facts, options),
        is_allowed=is_allowed,
        why_not=why,
        predicted=forecast.predicted if forecast else Prediction(output_tokens=facts.length.p50),
        terms=forecast.terms if forecast else (),
    )


def _depth(policy: str, facts: Facts, options: Mapping[str, Option]) -> int:
    if policy == BASELINE:
        return 0
    asked = facts.overrides.num_speculative_tokens
    if asked is not None:
        return asked
    option = options.get(policy)
    is_auto = facts.overrides.policy is None
    if is_auto and option is not None and option.forecast is not None and option.depth > 0:
        return option.depth
    return facts.methods.get(policy, 0)


def _is_exact(choice: _Choice, facts: Facts) -> bool:
    if choice.reason in (Reason.OVERRIDE, Reason.UNSUPPORTED_PARAMS):
        return True
    return choice.policy != BASELINE and facts.overrides.num_speculative_tokens is not None
