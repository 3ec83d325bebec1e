"""A scripted engine under the real planner, decisions and learner: time passes only in its steps.

What a step costs and what is accepted is a script; everything else is the product's own code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from engine.spec.planner import SequenceView, SpecPlan, StepView
from engine.stats import SequenceCounters
from engine.types import BASELINE, DraftWork, PolicyAssignment, PolicyChange, SamplingParams, StepRecord
from specgate.config import LearningConfig, PolicyConfig
from specgate.learning import Learner
from specgate.policy.decide import Facts, decide
from specgate.policy.plan_step import StepPlanner
from specgate.types import (
    Decision,
    GenerationRequest,
    LoadView,
    Overrides,
    RequestOutcome,
    TaskEstimate,
    Timings,
)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts. `call_s` is paid per draft call, whoever drafts."""

    base_s: float = 0.020
    token_s: float = 0.001
    kv_s: float = 1e-7
    call_s: float = 0.003
    draft_token_s: float = 1e-4
    prompt_token_s: float = 2e-4

    def slower(self, factor: float) -> Costs:
        """Everything takes `factor` times as long."""
        return Costs(*(value * factor for value in (
            self.base_s, self.token_s, self.kv_s, self.call_s, self.draft_token_s, self.prompt_token_s,
        )))  # fmt: skip


@dataclass
class Running:
    """A request inside the scripted engine."""

    request: GenerationRequest
    decision: Decision
    prompt_tokens: int
    output_tokens: int
    started_s: float
    counters: SequenceCounters = field(default_factory=SequenceCounters)
    num_output: int = 1
    method: str = BASELINE
    changes: list[tuple[int, str, str]] = field(default_factory=list)
    last: tuple[str, int, int] = (BASELINE, 0, 0)

    @property
    def policy(self) -> PolicyAssignment:
        """As the gateway would submit it."""
        d = self.decision
        is_fixed = d.reason == "override"
        return PolicyAssignment(
            d.policy, d.num_speculative_tokens, d.is_exact, is_fixed, hold_steps=d.hold_steps
        )

    def view(self, name: str) -> SequenceView:
        """As the engine shows it to the planner."""
        c = self.counters
        return SequenceView(
            seq_id=name, policy=self.policy, label=self.decision.task.label, temperature=0.0, top_p=1.0,
            num_tokens=self.prompt_tokens + self.num_output, num_output_tokens=self.num_output,
            num_remaining_tokens=self.output_tokens - self.num_output, num_drafts=c.num_drafts,
            num_draft_tokens=c.num_draft_tokens, num_accepted_tokens=c.num_accepted_tokens,
            last_method=self.last[0], last_num_draft_tokens=self.last[1],
            last_num_accepted_tokens=self.last[2],
        )  # fmt: skip


class ScriptedEngine:
    """Keeps `concurrency` requests running. `accept[method]` is the chance per draft token."""

    METHODS: ClassVar = {"draft": 5}

    def __init__(
        self,
        costs: Costs,
        accept: dict[str, float],
        *,
        concurrency: int = 4,
        noise: float = 0.02,
        seed: int = 0,
        overrides: Overrides | None = None,
        policy: PolicyConfig | None = None,
    ) -> None:
        self.costs = costs
        self.accept = accept
        self.concurrency = concurrency
        self.now_s = 0.0
        self.busy_s = 0.0
        self.policy_config = policy or PolicyConfig(max_queue_wait_p95_ms=None)
        self.learner = Learner(self.policy_config, LearningConfig())
        self.learner.set_methods(self.METHODS)
        self.planner = StepPlanner()
        self.overrides = overrides or Overrides()
        self.drafted_s = 0.0  # seconds that drafting sequences' steps took more than plain ones
        self.num_tokens = 0
        self.drafting: list[tuple[float, int, int]] = []  # when, drafting sequences, sequences
        self.changes: list[tuple[float, str]] = []
        self.decisions: list[tuple[float, str, str]] = []
        self.changes_per_request: list[tuple[float, int]] = []  # when it ended, unforced changes of method
        self._noise = noise
        self._random = random.Random(seed)
        self._running: dict[str, Running] = {}
        self._num_made = 0
        self._num_steps = 0
        self._published_s = -1.0
        self._given_to: list[str] = []
        self._given: Mapping[str, SpecPlan] = {}

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            self._publish()
            while len(self._running) < self.concurrency:
                self._arrive()
            self._step()

    def share_drafting(self, since_s: float, until_s: float | None = None) -> float:
        """Of sequence steps in that time, those that drafted."""
        end_s = self.now_s if until_s is None else until_s
        part = [(d, n) for at, d, n in self.drafting if since_s <= at < end_s]
        return sum(d for d, _ in part) / max(sum(n for _, n in part), 1)

    def num_changes(self, since_s: float) -> int:
        """Changes of method within running requests."""
        return sum(at >= since_s for at, _ in self.changes)

    def _publish(self) -> None:
        if self.now_s - self._published_s >= 0.5:
            self._published_s = self.now_s
            if self.learner.refresh():
                self.planner.update(self.learner.view.to_wire())

    def _arrive(self) -> None:
        self._num_made += 1
        request = GenerationRequest(
            f"r{self._num_made}", "chat", "m", SamplingParams(temperature=0.0, max_tokens=400),
            messages=({"role": "user", "content": "hi"},), overrides=self.overrides,
        )  # fmt: skip
        prompt, output = self._random.randint(20, 300), self._random.randint(60, 240)
        task = TaskEstimate("chat", 0.9)
        load = LoadView(num_running=len(self._running))
        facts = Facts(
            task=task,
            length=self.learner.length(request, task, prompt, 400),
            load=load,
            methods=self.METHODS,
            num_prompt_tokens=prompt,
            known=self.learner.experience(task, prompt, load),
            overrides=self.overrides,
        )
        decision = decide(facts, self.policy_config)
        self.learner.decided(decision)
        self.decisions.append((self.now_s, decision.policy, decision.reason))
        running = Running(request, decision, prompt, output, self.now_s)
        running.method = decision.policy
        self._prefill(prompt)
        self._running[request.request_id] = running

    def _prefill(self, prompt: int) -> None:
        seconds = (self.costs.base_s + self.costs.prompt_token_s * prompt) * self._jitter()
        self._record(seconds, 0, prompt, prompt, prompt, ())

    def _step(self) -> None:
        views = tuple(r.view(name) for name, r in self._running.items())
        plans = self._plan(views)
        costs, batch = self.costs, len(views)
        kv = sum(view.num_tokens for view in views)
        drafted: dict[str, list[tuple[Running, int]]] = {}
        for name, running in self._running.items():
            plan = plans.get(name)
            depth = plan.max_draft_tokens if plan is not None and plan.method != BASELINE else 0
            method = plan.method if plan is not None else running.method
            if plan is not None and method != running.method:
                running.method = method
                self.changes.append((self.now_s, plan.reason))
                running.changes.append((running.num_output, method, plan.reason))
            depth = min(depth, running.output_tokens - running.num_output - 1)
            if depth > 0:
                drafted.setdefault(method, []).append((running, depth))
        work = []
        for method, group in drafted.items():
            calls, tokens = max(depth for _, depth in group), sum(depth for _, depth in group)
            seconds = (calls * costs.call_s + tokens * costs.draft_token_s) * self._jitter()
            work.append(DraftWork(method, calls, len(group), tokens, 0, kv * len(group) // batch, seconds))
        num_tokens = batch + sum(w.num_draft_tokens for w in work)
        seconds = (costs.base_s + costs.token_s * num_tokens + costs.kv_s * kv) * self._jitter()
        seconds += sum(w.seconds for w in work)
        plain_s = costs.base_s + costs.token_s * batch + costs.kv_s * kv
        self.drafted_s += max(seconds - plain_s, 0.0) if work else 0.0
        self.drafting.append((self.now_s, sum(w.num_sequences for w in work), batch))
        lengths = {name: view.num_tokens for name, view in zip(self._running, views, strict=True)}
        window_kv = sum(
            depth * lengths[r.request.request_id] for group in drafted.values() for r, depth in group
        )
        self._record(seconds, batch, num_tokens, 0, kv, tuple(work), window_kv)
        self._advance({id(r): (m, d) for m, group in drafted.items() for r, d in group})

    def _plan(self, views: tuple[SequenceView, ...]) -> Mapping[str, SpecPlan]:
        """As the engine asks for it."""
        names = [view.seq_id for view in views]
        if names == self._given_to and self.planner.stands(self._num_steps):
            return self._given
        is_plain = all(running.method == BASELINE for running in self._running.values())
        if is_plain and self.planner.sleeps(self._num_steps, len(views)):
            return {}
        self._given_to = names
        self._given = self.planner.plan(StepView(self._num_steps, self.now_s, views, 0, 0, 1000))
        return self._given

    def _advance(self, granted: dict[int, tuple[str, int]]) -> None:
        for name, running in list(self._running.items()):
            method, depth = granted.get(id(running), (BASELINE, 0))
            accepted = 0
            while accepted < depth and self._random.random() < self.accept[method]:
                accepted += 1
            kept = min(accepted + 1, running.output_tokens - running.num_output)
            running.num_output += kept
            self.num_tokens += kept
            running.counters.num_target_steps += 1
            if depth:
                running.counters.grant(method)
                running.counters.add_draft(depth, min(accepted, kept), kept, method, depth)
            running.last = (method, depth, accepted)
            if running.num_output >= running.output_tokens:
                del self._running[name]
                self._finish(running)

    def _finish(self, running: Running) -> None:
        stats = running.counters.freeze(
            num_prompt_tokens=running.prompt_tokens, num_output_tokens=running.num_output, queue_wait_s=0.0
        )
        taken_s = self.now_s - running.started_s
        unforced = [reason for _, _, reason in running.changes if reason == "predicted_fastest"]
        self.changes_per_request.append((self.now_s, len(unforced)))
        self.learner.learn(
            RequestOutcome(
                running.request, running.decision, "ok", running.prompt_tokens, running.num_output,
                Timings(0.0, 0.05, taken_s, taken_s / running.num_output), (stats,),
                tuple(PolicyChange(at, policy, reason) for at, policy, reason in running.changes),
            )
        )  # fmt: skip

    def _record(
        self,
        seconds: float,
        batch: int,
        tokens: int,
        prompt: int,
        kv: int,
        work: tuple[DraftWork, ...],
        window_kv: int = 0,
    ) -> None:
        self._num_steps += 1
        kind = "prefill" if prompt else ("verify" if work else "decode")
        record = StepRecord(
            self._num_steps, self.now_s, seconds, kind, batch or 1, batch, tokens, prompt, kv, tokens, 0,
            batch, 0.0, sum(w.seconds for w in work), seconds, 0.0, drafts=work,
            num_window_kv_tokens=window_kv,
        )  # fmt: skip
        self.now_s += seconds + 1e-4
        self.busy_s += seconds
        self.learner.stepped(record)

    def _jitter(self) -> float:
        return self._random.lognormvariate(0.0, self._noise)


def replaced(costs: Costs, **changes: float) -> Costs:
    """The costs with some of them changed."""
    return replace(costs, **changes)
