"""Every series the server exports, in one place. Ratios are left to PromQL.

Counters are fed from step records and request outcomes; gauges are read when scraped. All series
are registered from the start, so that their HELP and TYPE lines are there before their first
sample. Labels hold configured names and closed vocabularies only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.types import BASELINE, StepRecord
from specgate.backends.openai_http.pool import Outcome
from specgate.costs import RequestCost
from specgate.policy.canary import Status
from specgate.policy.door import DoorState
from specgate.policy.guards import Change, task_name
from specgate.policy.reasons import Reason
from specgate.types import RequestOutcome

_SHORT_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_LONG_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 600.0,
)  # fmt: skip
_ERROR_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
_MAX_POSITION = 15  # deeper positions share the last label
_Series = TypeVar("_Series", Counter, Gauge, Histogram)
_NONE = "none"  # label of what was not decided
_ERROR_KINDS = ("exception", "oom", "timeout", "invalid_draft", "nan", "verify_mismatch")


@dataclass(frozen=True, slots=True)
class LiveReadings:
    """What is read when scraped. Absent parts of the memory are not exported."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks: Mapping[str, int] = field(default_factory=dict)  # free, cached, used
    num_engine_restarts: int = 0
    num_retries: int = 0
    retried_s: float = 0.0
    utilization: float | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # by part


class _LiveCollector(Collector):
    def __init__(self, read: Callable[[], LiveReadings]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield GaugeMetricFamily(
            "specgate_running_requests", "Answers being prefilled or decoded", value=now.num_running
        )
        yield GaugeMetricFamily(
            "specgate_waiting_requests",
            "Waiting for admission, or admitted and not yet scheduled by the engine",
            value=now.num_waiting,
        )
        blocks = GaugeMetricFamily(
            "specgate_kv_blocks", "Target KV blocks by state: free, cached, used", labels=["state"]
        )
        for state, number in now.kv_blocks.items():
            blocks.add_metric([state], number)
        yield blocks
        yield CounterMetricFamily(
            "specgate_engine_restarts", "Engine processes started again", value=now.num_engine_restarts
        )
        yield CounterMetricFamily(
            "specgate_retried_answers", "Answers begun again in a new engine process", value=now.num_retries
        )
        yield CounterMetricFamily(
            "specgate_retried_seconds", "Time they had run for in vain, waiting included", value=now.retried_s
        )
        utilization = GaugeMetricFamily(
            "specgate_accelerator_utilization_ratio",
            "Device utilisation; without a GPU, the share of the CPUs that this server uses",
        )
        if now.utilization is not None:
            utilization.add_metric([], now.utilization)
        yield utilization
        memory = GaugeMetricFamily(
            "specgate_accelerator_memory_bytes",
            "Device memory by part; without a GPU, `other` is what our processes hold beside the weights",
            labels=["part"],
        )
        for part, number in now.memory_bytes.items():
            memory.add_metric([part], number)
        yield memory


class Metrics:
    """The series, and how outcomes and step records feed them."""

    def __init__(self, registry: CollectorRegistry, read_live: Callable[[], LiveReadings]) -> None:
        self.registry = registry
        self._children: dict[tuple[object, ...], Any] = {}
        registry.register(_LiveCollector(read_live))
        self._register_requests()
        self._register_speculation()
        self._register_engine()
        self._register_models()

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"specgate_{name}", doc, labels, registry=self.registry)

    def _histogram(self, name: str, doc: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"specgate_{name}", doc, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(f"specgate_{name}", doc, labels, registry=self.registry)

    def _register_requests(self) -> None:
        by_task = ("policy", "task")
        self.requests = self._counter(
            "requests_total", "Requests by how they ended", "model", "endpoint", "outcome", *by_task
        )
        self.duration = self._histogram(
            "request_duration_seconds", "Arrival to last token", _LONG_S, *by_task
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Arrival to the first token handed to the writer",
            _LONG_S,
            *by_task,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between successive emissions to one stream", _SHORT_S, *by_task
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "(E2E - TTFT) / (output tokens - 1)", _SHORT_S, *by_task
        )
        self.queue_wait = self._histogram(
            "queue_wait_seconds",
            "Before the first scheduled step, by stage: admission, engine",
            _LONG_S,
            "stage",
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of admitted requests")
        self.output_tokens = self._counter("output_tokens_total", "Tokens emitted")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens_total", "Prompt tokens found in the prefix cache"
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request", _TOKENS, "task"
        )
        self.request_output_tokens = self._histogram(
            "request_output_tokens", "Output tokens per request", _TOKENS, "task"
        )
        self.reloads = self._counter("config_reloads_total", "Reloads of the configuration", "result")
        for result in ("ok", "invalid_config", "restart_needed"):
            self._of(self.reloads, result)
        by_tenant = ("tenant", "task")  # tenants are the configured API keys, "" without one
        self.tenant_output_tokens = self._counter("tenant_output_tokens_total", "Tokens emitted", *by_tenant)
        self.tenant_device_seconds = self._counter(
            "tenant_device_seconds_total", "Device time charged to requests that have ended", *by_tenant
        )
        self.network_seconds = self._counter(
            "network_seconds_total", "Time on the network, where a model is served elsewhere"
        )
        self.rejected = self._counter("rejected_requests_total", "Requests refused before they ran", "reason")

    def _register_speculation(self) -> None:
        by_task = ("policy", "task")
        self.decisions = self._counter(
            "decisions_total", "Decisions taken", "policy", "reason", "task", "arm"
        )
        self.drafts = self._counter("drafts_total", "Non-empty drafts verified", *by_task)
        self.draft_tokens = self._counter("draft_tokens_total", "Draft tokens verified", *by_task)
        self.accepted_tokens = self._counter("accepted_tokens_total", "Draft tokens accepted", *by_task)
        self.accepted_per_position = self._counter(
            "accepted_tokens_per_position_total",
            "Draft tokens accepted, by depth from 0",
            *by_task,
            "position",
        )
        self.rejections = self._counter(
            "rejections_total", "Drafts refused, by depth of the refused token from 0", *by_task, "position"
        )
        self.target_steps = self._counter(
            "target_steps_total", "Target forwards that emitted tokens, summed over requests"
        )
        self.target_steps_saved = self._counter(
            "target_steps_saved_total", "Target forwards plain decoding would have needed in addition"
        )
        self.guard_state = self._gauge(
            "guard_state", "0 allowed, 1 probing, 2 shut", "guard", "policy", "task"
        )
        self.guard_trips = self._counter("guard_trips_total", "Guards that shut", "guard", "reason")
        self.upstream_attempts = self._counter(
            "upstream_attempts_total",
            "Requests to the servers of a proxied model: ok, refused, left, connect, timeout, status, broken",
            "policy",
            "replica",
            "outcome",
        )
        self.drafter_errors = self._counter(
            "drafter_errors_total", "Drafters that failed in a step", "policy", "kind"
        )
        self.consistency_checks = self._counter(
            "consistency_checks_total", "Greedy answers decoded again plainly", "result"
        )
        for result in ("match", "mismatch", "abandoned"):  # a first one must be seen as an increase
            self._of(self.consistency_checks, result)

    def _register_engine(self) -> None:
        self.step_seconds = self._histogram("step_seconds", "One engine step", _SHORT_S, "kind")
        self.draft_seconds = self._counter("draft_seconds_total", "Time spent drafting", "policy")
        self.verify_seconds = self._counter("verify_seconds_total", "Time spent verifying and sampling")
        self.device_seconds = self._counter(
            "device_seconds_total",
            "Step time by policy and part: draft, forward, verify (the last two shared by tokens)",
            "policy",
            "part",
        )
        self.planner_errors = self._counter(
            "planner_errors_total", "Steps without speculation because the step planner failed"
        )
        self.preemptions = self._counter("preemptions_total", "Sequences pushed back for want of KV blocks")

    def _register_models(self) -> None:
        self.prediction_error = self._histogram(
            "prediction_error_seconds", "Absolute error of predictions", _ERROR_S, "model"
        )
        self.predicted_s = self._counter(
            "predicted_seconds_total", "Sum of predictions, to set beside what was measured", "model"
        )
        self.measured_s = self._counter(
            "measured_seconds_total", "Sum of what came of the same predictions", "model"
        )
        self.coefficient = self._gauge(
            "latency_model_coefficient", "Fitted coefficients, in their units", "name"
        )
        self.canary_stage = self._gauge("canary_stage", "Stage a rollout is in", "name")
        self.canary_status = self._gauge(
            "canary_status", "1 for the status a rollout has, 0 for the others", "name", "status"
        )
        by_arm = ("name", "arm")
        self.canary_requests = self._counter(
            "canary_requests_total", "Requests of a rollout by arm and how they ended", *by_arm, "outcome"
        )
        self.canary_ttft = self._histogram(
            "canary_time_to_first_token_seconds", "As time_to_first_token_seconds", _LONG_S, *by_arm
        )
        self.canary_tpot = self._histogram(
            "canary_time_per_output_token_seconds", "As time_per_output_token_seconds", _SHORT_S, *by_arm
        )
        self.canary_duration = self._histogram(
            "canary_request_duration_seconds", "As request_duration_seconds", _LONG_S, *by_arm
        )
        self.canary_share = self._gauge("canary_share_ratio", "Share of traffic a rollout gets", "name")

    # --- feeding ---------------------------------------------------------------------------

    def door_stands(self, guard: Reason, policy: str, task: str | None, state: DoorState) -> None:
        """Where a guard's door is. Tasks: "" for all, "mixed" for requests of no certain task."""
        level = {DoorState.ALLOWED: 0, DoorState.PROBING: 1, DoorState.SHUT: 2}[state]
        self._of(self.guard_state, guard.value, policy, task_name(task) or "").set(level)

    def door_moved(self, change: Change) -> None:
        """A guard shut a policy, or let it in again."""
        self.door_stands(change.guard, change.policy, change.task, change.after)
        if change.after is DoorState.SHUT:
            self._of(self.guard_trips, change.guard.value, change.kind).inc()

    def loaded(self, methods: Iterable[str]) -> None:
        """Drafters that are there: their first error must be seen as an increase."""
        for method in methods:
            for kind in _ERROR_KINDS:
                self._of(self.drafter_errors, method, kind)

    def checked(self, result: str) -> None:
        """A consistency check: match, mismatch or abandoned."""
        self._of(self.consistency_checks, result).inc()

    def rollout_moved(self, name: str, stage: int, share: float, status: str) -> None:
        """A rollout began, rose or fell."""
        self._of(self.canary_stage, name).set(stage)
        self._of(self.canary_share, name).set(share)
        for known in Status:
            self._of(self.canary_status, name, known.value).set(known == status)

    def arm_finished(self, name: str, arm: str, outcome: RequestOutcome) -> None:
        """A request of an arm of a rollout has ended."""
        timings = outcome.timings
        self._of(self.canary_requests, name, arm, outcome.outcome).inc()
        if outcome.outcome != "ok":
            return
        self._of(self.canary_duration, name, arm).observe(timings.e2e_s)
        if timings.ttft_s is not None:
            self._of(self.canary_ttft, name, arm).observe(timings.ttft_s)
        if timings.tpot_s is not None:
            self._of(self.canary_tpot, name, arm).observe(timings.tpot_s)

    def refused(self, model: str, endpoint: str, reason: str) -> None:
        """A request that never came to a decision."""
        self._of(self.rejected, reason).inc()
        self._of(self.requests, model, endpoint, "refused", _NONE, _NONE).inc()

    def reloaded(self, result: str) -> None:
        """A reload: ok, invalid_config or restart_needed."""
        self._of(self.reloads, result).inc()

    def turned_away(self, reason: str) -> None:
        """A caller without a valid key."""
        self._of(self.rejected, reason).inc()

    def undecided(self, model: str, endpoint: str, outcome: str) -> None:
        """A request that ended before there was a decision: its client left, or we failed."""
        self._of(self.requests, model, endpoint, outcome, _NONE, _NONE).inc()

    def finished(self, outcome: RequestOutcome, admission_wait_s: float) -> None:
        """A request that was decided, however it ended."""
        decision, timings = outcome.decision, outcome.timings
        labels = (decision.policy, decision.task.label)
        self._of(
            self.requests, outcome.request.model, outcome.request.endpoint, outcome.outcome, *labels
        ).inc()
        self._of(
            self.decisions, decision.policy, decision.reason, decision.task.label, decision.arm or ""
        ).inc()
        self._of(self.queue_wait, "admission").observe(admission_wait_s)
        if outcome.stats:
            self._of(self.queue_wait, "engine").observe(max(0.0, timings.queue_wait_s - admission_wait_s))
        self.prompt_tokens.inc(outcome.num_prompt_tokens)
        self.output_tokens.inc(outcome.num_output_tokens)
        self._of(self.request_prompt_tokens, labels[1]).observe(outcome.num_prompt_tokens)
        if timings.ttft_s is not None:
            self._of(self.ttft, *labels).observe(timings.ttft_s)
        itl = self._of(self.itl, *labels)
        for gap_s, _ in outcome.inter_token_s:
            itl.observe(gap_s)
        if outcome.outcome == "ok":
            self._of(self.duration, *labels).observe(timings.e2e_s)
            self._of(self.request_output_tokens, labels[1]).observe(outcome.num_output_tokens)
            if timings.tpot_s is not None:
                self._of(self.tpot, *labels).observe(timings.tpot_s)
        self._count_drafts(outcome)

    def charged(self, outcome: RequestOutcome, cost: RequestCost) -> None:
        """What a request cost, for who asked."""
        labels = (outcome.request.tenant, outcome.decision.task.label)
        self._of(self.tenant_output_tokens, *labels).inc(outcome.num_output_tokens)
        if cost.device_s is not None:
            self._of(self.tenant_device_seconds, *labels).inc(cost.device_s)
        if cost.network_s is not None:
            self.network_seconds.inc(cost.network_s)

    def _count_drafts(self, outcome: RequestOutcome) -> None:
        """Under the method that drafted, which is not always the one decided for at first."""
        for stats in outcome.stats:
            self.cached_tokens.inc(stats.num_cached_tokens)
            self.target_steps.inc(stats.num_target_steps)
            self.target_steps_saved.inc(max(0, stats.num_output_tokens - stats.num_target_steps))
            for counts in stats.by_method:
                if not counts.num_drafts:
                    continue
                labels = (counts.method, outcome.decision.task.label)
                self._of(self.drafts, *labels).inc(counts.num_drafts)
                self._of(self.draft_tokens, *labels).inc(counts.num_draft_tokens)
                self._of(self.accepted_tokens, *labels).inc(sum(counts.accepted_per_position))
                pairs = zip(counts.accepted_per_position, counts.refused_per_position, strict=True)
                for depth, (accepted, refused) in enumerate(pairs):
                    position = str(min(depth, _MAX_POSITION))
                    self._of(self.accepted_per_position, *labels, position).inc(accepted)
                    self._of(self.rejections, *labels, position).inc(refused)

    def stepped(self, record: StepRecord) -> None:
        """One engine step. Synthetic ones do not count."""
        if record.is_warm_up:
            return
        self._of(self.step_seconds, record.kind).observe(record.seconds)
        self.verify_seconds.inc(record.verify_s)
        self.preemptions.inc(record.num_preemptions)
        self.planner_errors.inc(record.num_planner_errors)
        drafted = 0
        for work in record.drafts:
            self._of(self.draft_seconds, work.method).inc(work.seconds)
            self._of(self.device_seconds, work.method, "draft").inc(work.seconds)
            tokens = (
                work.num_sequences + work.num_draft_tokens
            )  # each sequence's own token comes with its draft
            self._share(record, work.method, tokens)
            drafted += tokens
        self._share(record, BASELINE, max(0, record.num_tokens - drafted))
        for error in record.drafter_errors:
            self._of(self.drafter_errors, error.method, error.kind).inc()

    def attempted(self, policy: str, replica: str, outcome: Outcome) -> None:
        """A request to another server has ended."""
        self._of(self.upstream_attempts, policy, replica, outcome.value).inc()
        if policy != BASELINE and outcome.failed:
            kind = "timeout" if outcome is Outcome.TIMEOUT else "exception"
            self._of(self.drafter_errors, policy, kind).inc()

    def predicted(self, model: str, predicted_s: float, measured_s: float) -> None:
        """What was predicted, and what came of it."""
        self._of(self.prediction_error, model).observe(abs(predicted_s - measured_s))
        self._of(self.predicted_s, model).inc(max(0.0, predicted_s))
        self._of(self.measured_s, model).inc(max(0.0, measured_s))

    def fitted(self, coefficients: Mapping[str, float]) -> None:
        """The latency model as it stands."""
        for name, value in coefficients.items():
            self._of(self.coefficient, name).set(value)

    def _of(self, series: _Series, *labels: str) -> _Series:
        """The series with these labels. Remembered: looking one up costs more than counting."""
        key = (series, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = series.labels(*labels)
        return cast(_Series, child)

    def _share(self, record: StepRecord, policy: str, num_tokens: int) -> None:
        """A policy's share of the step's forward and verify time, by tokens."""
        if num_tokens and record.num_tokens:
            share = min(1.0, num_tokens / record.num_tokens)
            self._of(self.device_seconds, policy, "forward").inc(share * record.forward_s)
            self._of(self.device_seconds, policy, "verify").inc(share * record.verify_s)
