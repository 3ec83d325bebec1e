"""What the dashboards show: rows of panels, a panel being a title with queries. `build.py` writes the files.

Rates are taken over `$__rate_interval`, which Grafana fits to the scrape interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RATE = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """`queries`: (PromQL, legend) each. `kind`: a Grafana panel type."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    is_stacked: bool = False
    states: tuple[tuple[str, str, str], ...] = ()  # (value, word, colour), of a state timeline


def panel(title: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """Shorter to write."""
    return Panel(title, queries, **more)


def rate(name: str, by: str = "", where: str = "") -> str:
    """Per second, summed by labels."""
    return f"sum by ({by}) (rate(specgate_{name}{where}[{RATE}]))"


def quantile(q: float, name: str, by: str = "") -> str:
    """Of a histogram, by labels."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate(specgate_{name}_bucket[{RATE}])))"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """The three that are watched, apart from each other."""
    return tuple((quantile(q, name), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


def mean(name: str, by: str) -> str:
    """Of a histogram, by labels."""
    return f"{rate(name + '_sum', by)} / {rate(name + '_count', by)}"


SERVICE = [
    [
        panel(
            "Requests per second, by how they ended",
            (rate("requests_total", "outcome"), "{{outcome}}"),
            unit="reqps",
            is_stacked=True,
        ),
        panel(
            "Refused, by reason",
            (rate("rejected_requests_total", "reason"), "{{reason}}"),
            unit="reqps",
            is_stacked=True,
        ),
        panel(
            "Running and waiting",
            ("sum(specgate_running_requests)", "running"),
            ("sum(specgate_waiting_requests)", "waiting"),
        ),
    ],
    [
        panel("Time to first token", *quantiles("time_to_first_token_seconds"), unit="s"),
        panel("Inter-token latency", *quantiles("inter_token_latency_seconds"), unit="s"),
        panel("Time per output token", *quantiles("time_per_output_token_seconds"), unit="s"),
    ],
    [
        panel("End to end", *quantiles("request_duration_seconds"), unit="s"),
        panel("Queue wait p95, by stage", ("specgate:queue_wait_seconds:p95_rate5m", "{{stage}}"), unit="s"),
        panel(
            "Share of the objectives missed, over an hour",
            ("specgate:ttft_slow:ratio_rate1h", "first token"),
            ("specgate:itl_slow:ratio_rate1h", "gaps"),
            ("specgate:tpot_slow:ratio_rate1h", "per output token"),
            unit="percentunit",
            about="1 % is planned; alerts ring at 6 % and 14.4 %.",
        ),
    ],
    [
        panel(
            "p99 of time per output token, by policy",
            (quantile(0.99, "time_per_output_token_seconds", "policy"), "{{policy}}"),
            unit="s",
        ),
        panel(
            "Time to first token p95, by task",
            (quantile(0.95, "time_to_first_token_seconds", "task"), "{{task}}"),
            unit="s",
        ),
        panel(
            "Tokens per second",
            (rate("output_tokens_total"), "output"),
            (rate("prompt_tokens_total"), "prompt"),
            (rate("cached_prompt_tokens_total"), "of the prompts, found in the prefix cache"),
        ),
    ],
    [
        panel(
            "Mean prompt length, by task",
            (mean("request_prompt_tokens", "task"), "{{task}}"),
            about="Tokens.",
        ),
        panel(
            "Mean output length, by task",
            (mean("request_output_tokens", "task"), "{{task}}"),
            about="Tokens.",
        ),
        panel("KV blocks", ("sum by (state) (specgate_kv_blocks)", "{{state}}"), is_stacked=True),
    ],
    [
        panel(
            "Device utilisation",
            ("specgate_accelerator_utilization_ratio", "{{instance}}"),
            unit="percentunit",
            about="Without a GPU, the share of the CPUs that the server uses.",
        ),
        panel(
            "Memory, by part",
            ("sum by (part) (specgate_accelerator_memory_bytes)", "{{part}}"),
            unit="bytes",
            is_stacked=True,
        ),
        panel(
            "Preemptions, engine restarts, reloads",
            (rate("preemptions_total"), "preemptions per second"),
            ("sum(specgate_engine_restarts_total)", "restarts so far"),
            ("sum by (result) (specgate_config_reloads_total)", "reloads so far: {{result}}"),
        ),
    ],
]

ACCEPTED_AT = rate("accepted_tokens_per_position_total", "policy, position")
SPECULATION = [
    [
        panel("Policy mix", (rate("decisions_total", "policy"), "{{policy}}"), unit="reqps", is_stacked=True),
        panel("Reasons", (rate("decisions_total", "reason"), "{{reason}}"), unit="reqps", is_stacked=True),
        panel(
            "Target steps saved",
            ("specgate:target_steps_saved:ratio_rate5m", "of all that plain decoding would have taken"),
            unit="percentunit",
        ),
    ],
    [
        panel(
            "Speed-up against baseline of the same task",
            ("specgate:speedup:ratio_rate30m", "{{policy}}, {{task}}"),
            ("specgate:speculation_gain:ratio_rate30m", "all, by the engine's time"),
            about="Time per output token of baseline, in times of the policy's. Below 1 it is slower.",
        ),
        panel(
            "Acceptance, by policy and task",
            ("specgate:acceptance:ratio_rate30m", "{{policy}}, {{task}}"),
            unit="percentunit",
        ),
        panel(
            "Mean acceptance length",
            ("specgate:acceptance_length:mean_rate5m", "{{policy}}, {{task}}"),
            about="Tokens per verified draft, the bonus token included.",
        ),
    ],
    [
        panel(
            "Accepted, by position",
            (
                f"{ACCEPTED_AT} / on (policy) group_left () {rate('drafts_total', 'policy')}",
                "{{policy}}, {{position}}",
            ),
            unit="percentunit",
            about="Share of drafts whose token at this depth, from 0, was accepted.",
        ),
        panel(
            "Refused, by position",
            (rate("rejections_total", "policy, position"), "{{policy}}, {{position}}"),
            unit="ops",
            is_stacked=True,
        ),
        panel(
            "Draft tokens per second",
            (rate("draft_tokens_total", "policy"), "{{policy}}, drafted"),
            (rate("accepted_tokens_total", "policy"), "{{policy}}, accepted"),
        ),
    ],
    [
        panel(
            "Guards",
            ("max by (guard, policy, task) (specgate_guard_state)", "{{guard}}, {{policy}} {{task}}"),
            kind="state-timeline",
            states=(("0", "allowed", "green"), ("1", "probing", "yellow"), ("2", "shut", "red")),
        ),
        panel(
            "Guards that shut",
            (rate("guard_trips_total", "guard, reason"), "{{guard}}, {{reason}}"),
            unit="ops",
        ),
        panel(
            "Drafter errors",
            (rate("drafter_errors_total", "policy, kind"), "{{policy}}, {{kind}}"),
            unit="ops",
        ),
    ],
    [
        panel("Consistency checks", (rate("consistency_checks_total", "result"), "{{result}}"), unit="ops"),
        panel("Drafts per second", (rate("drafts_total", "policy"), "{{policy}}"), unit="ops"),
        panel(
            "Steps planned plainly because the planner failed",
            (rate("planner_errors_total"), "steps"),
            unit="ops",
        ),
    ],
]


def predicted_beside_measured(name: str, model: str, about: str) -> Panel:
    """Means of both, over the same predictions."""
    where = f'{{model="{model}"}}'
    count = rate("prediction_error_seconds_count", "", where)
    return panel(
        f"Predicted and measured: {name}",
        (f"{rate('predicted_seconds_total', '', where)} / {count}", "predicted"),
        (f"{rate('measured_seconds_total', '', where)} / {count}", "measured"),
        unit="s",
        about=about,
    )


LATENCY_MODEL = [
    [
        predicted_beside_measured(
            "step", "step_latency", "Each step is predicted before it is learned from."
        ),
        predicted_beside_measured("time to first token", "ttft", "As predicted when requests were decided."),
        predicted_beside_measured("end to end", "e2e", "As predicted when requests were decided."),
    ],
    [
        panel(
            "Mean absolute error, as a share of what was measured",
            ("specgate:prediction_error:ratio_rate30m", "{{model}}"),
            unit="percentunit",
        ),
        panel(
            "Absolute error p95", (quantile(0.95, "prediction_error_seconds", "model"), "{{model}}"), unit="s"
        ),
        panel("Step time p95, by kind", (quantile(0.95, "step_seconds", "kind"), "{{kind}}"), unit="s"),
    ],
    [
        panel(
            "Coefficients: seconds",
            (
                'specgate_latency_model_coefficient{name!~".*(knee|calls_per_token|kv_per_target_kv|fill_per_token|asked_share)"}',
                "{{name}}",
            ),
            unit="s",
            about="Of the step model; /admin/state has the units of each.",
        ),
        panel(
            "Coefficients: counts",
            (
                'specgate_latency_model_coefficient{name=~".*(knee|calls_per_token|kv_per_target_kv|fill_per_token|asked_share)"}',
                "{{name}}",
            ),
        ),
        panel(
            "Steps per second, by kind",
            (rate("step_seconds_count", "kind"), "{{kind}}"),
            unit="ops",
            is_stacked=True,
        ),
    ],
]

ROLLOUT = [
    [
        panel(
            "Status",
            ("max by (name, status) (specgate_canary_status)", "{{name}}: {{status}}"),
            kind="state-timeline",
            states=(("0", "no", "text"), ("1", "yes", "blue")),
        ),
        panel("Stage", ("max by (name) (specgate_canary_stage)", "{{name}}"), about="Counted from 0."),
        panel(
            "Share of the requests in scope",
            ("max by (name) (specgate_canary_share_ratio)", "{{name}}"),
            unit="percentunit",
        ),
    ],
    [
        panel(
            "Time per output token, by arm",
            (mean("canary_time_per_output_token_seconds", "name, arm"), "{{name}}, {{arm}}"),
            unit="s",
        ),
        panel(
            "Time to first token, by arm",
            (mean("canary_time_to_first_token_seconds", "name, arm"), "{{name}}, {{arm}}"),
            unit="s",
        ),
        panel(
            "End to end, by arm",
            (mean("canary_request_duration_seconds", "name, arm"), "{{name}}, {{arm}}"),
            unit="s",
        ),
    ],
    [
        panel(
            "Time per output token p95, by arm",
            (quantile(0.95, "canary_time_per_output_token_seconds", "name, arm"), "{{name}}, {{arm}}"),
            unit="s",
        ),
        panel(
            "Speed-up of the candidate over the control",
            ("specgate:canary_speedup:ratio_rate30m", "{{name}}"),
        ),
        panel(
            "Requests, by arm and how they ended",
            (rate("canary_requests_total", "name, arm, outcome"), "{{name}}, {{arm}}: {{outcome}}"),
            unit="reqps",
        ),
    ],
    [
        panel(
            "Decisions, by arm and policy",
            (rate("decisions_total", "arm, policy"), "{{arm}} {{policy}}"),
            unit="reqps",
            is_stacked=True,
        )
    ],
]

PRICE = "$price / 3600"  # per second
DRAFTING = '{part="draft"}'
COST = [
    [
        panel(
            "Device time, by policy",
            (rate("device_seconds_total", "policy"), "{{policy}}"),
            unit="percentunit",
            is_stacked=True,
            about="Seconds of the device per second.",
        ),
        panel(
            "Device time, by part",
            (rate("device_seconds_total", "part"), "{{part}}"),
            unit="percentunit",
            is_stacked=True,
        ),
        panel(
            "Share of device time spent on drafts",
            (f"{rate('device_seconds_total', '', DRAFTING)} / {rate('device_seconds_total')}", "drafts"),
            unit="percentunit",
        ),
    ],
    [
        panel(
            "Cost per 1,000 output tokens",
            (
                f"{rate('device_seconds_total')} * {PRICE} / {rate('output_tokens_total')} * 1000",
                "all policies",
            ),
            about="Busy device time, at the price per device hour chosen above.",
        ),
        panel(
            "Cost per request",
            (f"{rate('device_seconds_total')} * {PRICE} / {rate('requests_total')}", "all policies"),
        ),
        panel(
            "Target steps",
            (rate("target_steps_total"), "taken"),
            (rate("target_steps_saved_total"), "saved"),
            unit="ops",
            is_stacked=True,
        ),
    ],
    [
        panel("Draft time", (rate("draft_seconds_total", "policy"), "{{policy}}"), unit="percentunit"),
        panel("Verify time", (rate("verify_seconds_total"), "verification and sampling"), unit="percentunit"),
        panel(
            "Memory, by part",
            ("sum by (part) (specgate_accelerator_memory_bytes)", "{{part}}"),
            unit="bytes",
            is_stacked=True,
        ),
    ],
    [
        panel(
            "Cost per hour, by tenant",
            (f"{rate('tenant_device_seconds_total', 'tenant')} * $price", "{{tenant}}"),
            is_stacked=True,
        ),
        panel(
            "Output tokens, by tenant",
            (rate("tenant_output_tokens_total", "tenant"), "{{tenant}}"),
            is_stacked=True,
        ),
        panel(
            "Tries at servers elsewhere",
            (rate("upstream_attempts_total", "policy, outcome"), "{{policy}}: {{outcome}}"),
            unit="reqps",
        ),
        panel(
            "Answers begun again after an engine was lost",
            (rate("retried_answers_total"), "answers per second"),
            (rate("retried_seconds_total"), "their lost time, seconds per second"),
        ),
        panel(
            "Network time",
            (rate("network_seconds_total"), "to and from servers elsewhere"),
            unit="percentunit",
        ),
    ],
]

DASHBOARDS = {
    "service-levels": ("Service levels", SERVICE),
    "speculation": ("Speculation", SPECULATION),
    "latency-model": ("Latency model", LATENCY_MODEL),
    "rollout": ("Rollout", ROLLOUT),
    "cost": ("Cost", COST),
}
