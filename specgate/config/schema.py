"""Every setting there is: frozen, typed, with its meaning and limits beside it.

Nothing here reads files; `specgate.config.loader` does. The JSON schema and the messages of
`check-config` are generated from these classes.
"""

# ruff: noqa: RUF009 - `setting` is `dataclasses.field` with a doc

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from engine.config import (
    DraftModelConfig,
    EngineConfig,
    HybridConfig,
    ImposedConfig,
    NgramConfig,
    SuffixConfig,
)
from specgate.config.fields import TaskName, setting
from specgate.config.guards import GuardsConfig
from specgate.config.limits import AdmissionConfig, KeyLimits
from specgate.config.telemetry import TelemetryConfig
from specgate.config.upstream import OpenAIHttpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The listening socket and the limits on what comes in through it."""

    host: str = setting("127.0.0.1", "address to bind")
    port: int = setting(8080, "port to bind; 0 picks a free one", ge=0, le=65535)
    max_body_bytes: int = setting(8 * 1024 * 1024, "larger bodies get a 413", ge=1024)
    max_json_depth: int = setting(64, "deeper JSON gets a 400", ge=4, le=200)
    head_timeout_s: float = setting(15.0, "for the head of a request to arrive; then cut off", gt=0)
    body_timeout_s: float = setting(60.0, "for its body to arrive; then 408", gt=0)
    write_timeout_s: float = setting(
        60.0, "a client that reads nothing for this long, with an answer waiting, is cut off", gt=0
    )
    keepalive_s: float = setting(75.0, "an idle connection is closed after this long", gt=0)
    drain_grace_s: float = setting(30.0, "on SIGTERM, how long running requests may take to finish", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """A key, stored as its hash: `printf %s "$KEY" | sha256sum`."""

    name: str = setting(MISSING, "whose key it is: the tenant in logs and metrics", pattern=r"[\w.@-]{1,64}")
    sha256: str = setting(MISSING, "SHA-256 of the key in hex", pattern=r"[0-9a-f]{64}")
    limits: KeyLimits | None = setting(None, "what it may use; null: as `admission.per_key` says")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who may call. Bound to anything but loopback, keys are required."""

    keyless_on_loopback: bool = setting(
        False, "no keys needed, for requests and admin, while bound to a loopback address"
    )
    api_keys: tuple[KeyConfig, ...] = setting((), "keys for /v1, /tokenize and /detokenize")
    admin_keys: tuple[KeyConfig, ...] = setting((), "keys for /admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsConfig:
    """What one request may ask for."""

    allow_overrides: bool = setting(False, "callers may choose the policy; otherwise that is a 403")
    deadline_s: float = setting(600.0, "from arrival to the last token; then 408", gt=0)
    max_prompt_chars: int = setting(
        2_000_000, "characters of one prompt, or of all messages; longer ones are not even encoded", ge=1
    )
    max_n: int = setting(16, "largest `n`", ge=1, le=128)
    max_prompts: int = setting(64, "most prompts in one call of /v1/completions", ge=1, le=2048)
    max_stop: int = setting(16, "most stop strings, and most stop token ids", ge=1, le=1024)
    max_logprobs: int = setting(20, "largest `top_logprobs` and `logprobs`", ge=0, le=100)
    max_schema_bytes: int = setting(
        131_072, "largest JSON schema of `response_format`, and of all `tools` together", ge=256
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """A scripted backend: no model, exact tokens and delays. For tests and load on the gateway."""

    text: str = setting(
        "The quick brown fox jumps over the lazy dog. ", "what it answers; a token a character"
    )
    prefill_s: float = setting(0.0, "delay before the first step", ge=0)
    step_s: float = setting(0.0, "delay of every step", ge=0)
    methods: Mapping[str, int] = setting(
        lambda: {"ngram": 4, "draft": 5}, "speculation methods it claims, with their default depth"
    )
    accepted_per_draft: int = setting(2, "draft tokens accepted in every draft, at most", ge=0)
    max_model_len: int = setting(8192, "context length it claims", ge=16)
    fail_after_tokens: int | None = setting(
        None, "fail when that many tokens are out; 0: before the first", ge=0
    )
    hang_after_tokens: int | None = setting(None, "hang when that many tokens are out", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """When an engine process is given up and started again."""

    load_timeout_s: float = setting(600.0, "not ready this long after its start", gt=0)
    hang_timeout_s: float = setting(
        60.0, "no sign of life, or requests but no step, for this long; must exceed the longest step", gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One served model: its name in the API and who runs it."""

    id: str = setting(MISSING, "name in the API", pattern=r"[\w.:/@+-]{1,128}")
    backend: Literal["embedded", "openai_http", "fake"] = setting("embedded", "who runs it")
    engine: EngineConfig | None = setting(None, "settings of the embedded engine (backend: embedded)")
    supervision: SupervisionConfig = setting(SupervisionConfig, SupervisionConfig.__doc__ or "")
    openai_http: OpenAIHttpConfig | None = setting(
        None, "servers elsewhere that run it (backend: openai_http)"
    )
    fake: FakeConfig | None = setting(None, "the script (backend: fake)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The rule policy: which load means plain decoding, which tasks get which drafter."""

    max_requests_per_s: float | None = setting(None, "above it requests decode plainly; null: no limit", gt=0)
    max_queue_wait_p95_ms: float | None = setting(
        200.0, "above it requests decode plainly; null: no limit", gt=0
    )
    window_s: float = setting(30.0, "how far back rate and queue wait look", gt=0)
    min_window_samples: int = setting(20, "fewer queue waits in the window say nothing", ge=1)
    ngram_tasks: tuple[TaskName, ...] = setting(
        ("document_qa", "summarization", "code_edit"), "tasks whose answers repeat their input"
    )
    draft_min_output_tokens: int = setting(
        256, "the draft model needs a longer expected answer than this", ge=0
    )
    draft_min_acceptance: float = setting(0.65, "and a median acceptance above this", ge=0, le=1)
    router: Literal["model", "rule"] = setting(
        "model", "model: what is predicted to be best; rule: the rules above, always"
    )
    objective: Literal["latency", "throughput", "slo"] = setting(
        "latency", "what is predicted and compared, unless a request names another"
    )
    slo_ttft_ms: float | None = setting(None, "objective slo: time to first token to meet", gt=0)
    slo_tpot_ms: float | None = setting(None, "objective slo: time per output token to meet", gt=0)
    switch_margin: float = setting(
        0.03,
        "what replaces the policy in force must be better by this share, drafts than none by twice or thrice",
        ge=0,
        le=0.5,
    )
    limits_always: bool = setting(
        False, "the two limits above hold also where the latency model knows what each policy costs"
    )
    explore_share: float = setting(
        0.005, "share of the engine's time that trying policies of unknown yield may cost", ge=0, le=0.2
    )
    probe_share: float = setting(
        0.01, "share of the engine's time that trying methods which are not in use may cost", ge=0, le=0.2
    )
    acceptance_window: int = setting(200, "finished requests per policy and task the median is over", ge=1)
    min_acceptance_samples: int = setting(8, "fewer finished requests say nothing", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """What the models learn from, and where they keep it."""

    folder: str | None = setting(None, "keeps what was learned, one JSON file a model; null: memory only")
    save_every_s: float = setting(30.0, "between two saves; also saved at the end", gt=0)
    publish_every_s: float = setting(2.0, "between two snapshots to decisions and engine", ge=0.05)
    sweep_s: float = setting(
        4.0, "at a first start, how long the engine may try out step sizes; 0: not at all", ge=0, le=120
    )
    min_steps: int = setting(40, "fewer decode steps seen: the rules decide (cold start)", ge=1)
    min_drafting_steps: int = setting(
        32, "a drafter granted fewer steps is tried out (exploration) before it is judged", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLogConfig:
    """One JSON line per request: inputs, decision, outcome. Never the prompt's text."""

    path: str | None = setting(None, "file to append to; null: memory only")
    max_bytes: int = setting(64 * 1024 * 1024, "the file is rotated at this size", ge=4096)
    max_files: int = setting(5, "rotated files kept", ge=1, le=1000)
    ring_size: int = setting(1000, "decisions kept in memory for /admin/decisions", ge=1, le=100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """The process's own log, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", "least level written")
    format: Literal["json", "text"] = setting("text", "json: one object a line")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """Rollouts by steps: one YAML file each, see `configs/canary/`."""

    folder: str | None = setting(None, "folder of rollout files; null: no rollouts")
    state_path: str = setting(
        "state/canary.json", "where stages, evidence and rollbacks are kept over restarts"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """What device time costs: shown per request, in /admin/state, in metrics and by `specgate report`."""

    price_per_device_hour: float | None = setting(None, "in `currency`; null: no amounts are shown", ge=0)
    currency: str = setting("USD", "of the price", pattern=r"[A-Z]{3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All of it."""

    models: tuple[ModelConfig, ...] = setting(MISSING, "what is served; at least one")
    server: ServerConfig = setting(ServerConfig, ServerConfig.__doc__ or "")
    auth: AuthConfig = setting(AuthConfig, AuthConfig.__doc__ or "")
    requests: RequestsConfig = setting(RequestsConfig, RequestsConfig.__doc__ or "")
    admission: AdmissionConfig = setting(AdmissionConfig, AdmissionConfig.__doc__ or "")
    policy: PolicyConfig = setting(PolicyConfig, PolicyConfig.__doc__ or "")
    learning: LearningConfig = setting(LearningConfig, LearningConfig.__doc__ or "")
    guards: GuardsConfig = setting(GuardsConfig, GuardsConfig.__doc__ or "")
    canary: CanaryConfig = setting(CanaryConfig, CanaryConfig.__doc__ or "")
    decision_log: DecisionLogConfig = setting(DecisionLogConfig, DecisionLogConfig.__doc__ or "")
    logging: LoggingConfig = setting(LoggingConfig, LoggingConfig.__doc__ or "")
    costs: CostsConfig = setting(CostsConfig, CostsConfig.__doc__ or "")
    telemetry: TelemetryConfig = setting(TelemetryConfig, TelemetryConfig.__doc__ or "")
    benching: bool = setting(False, "a server to be measured, not used: allows engine.imposed")


ENGINE_LIMITS: Mapping[type, Mapping[str, Mapping[str, Any]]] = {
    EngineConfig: {
        "model": {"doc": "folder, GGUF file, or package:NAME"},
        "device": {"doc": "cpu or cuda", "pattern": r"cpu|cuda(:\d+)?"},
        "dtype": {
            "doc": "float32, bfloat16, float16, int8 (CPU: weights in 4 or 8 bits, products in integers),"
            " or auto: bfloat16 on a GPU; on the CPU int8 for a file that is quantised already, else float32",
            "pattern": r"auto|float32|bfloat16|float16|int8",
        },
        "num_threads": {"doc": "torch CPU threads; null: torch's choice", "ge": 1},
        "block_size": {"doc": "tokens in a KV block", "ge": 1, "le": 1024},
        "num_blocks": {"doc": "KV blocks of the target", "ge": 2},
        "max_model_len": {"doc": "longest sequence; null: the model's own", "ge": 16},
        "max_batch_tokens": {"doc": "token budget of a step", "ge": 1},
        "max_sequences": {"doc": "sequences in a step", "ge": 1},
        "enable_prefix_cache": {"doc": "share KV of equal prompt beginnings"},
        "accept_rule": {"doc": "for unseeded sampled drafts: ratio, block or keyed"},
        "ngram": {"doc": "prompt lookup; null: not loaded"},
        "suffix": {"doc": "suffix decoding; null: not loaded"},
        "draft_model": {"doc": "a draft model or draft head as drafter; null: not loaded"},
        "hybrid": {"doc": "suffix decoding or the draft model, step by step; null: not loaded"},
        "draft_timeout_s": {
            "doc": "a drafter that takes longer in a step counts as failed (timeout)",
            "gt": 0,
        },
        "imposed": {"doc": "the draft model's acceptance, imposed; only with benching: true"},
    },
    ImposedConfig: {
        "acceptance": {"doc": "chance per draft position that it is right, given that those before were"},
    },
    NgramConfig: {
        "num_speculative_tokens": {"doc": "draft tokens a step", "ge": 1, "le": 64},
        "prompt_lookup_min": {"doc": "shortest match", "ge": 1, "le": 64},
        "prompt_lookup_max": {"doc": "longest match", "ge": 1, "le": 64},
    },
    SuffixConfig: {
        "num_speculative_tokens": {"doc": "draft tokens a step, at most", "ge": 1, "le": 64},
        "min_match": {"doc": "tokens that must match in the text itself", "ge": 1, "le": 64},
        "min_match_past": {"doc": "tokens that must match in past outputs", "ge": 1, "le": 64},
        "min_confidence": {"doc": "a draft ends where it is less likely than this", "gt": 0, "le": 0.99},
        "share_past_outputs": {"doc": "learn from past outputs of the same tenant and task"},
        "scope_tokens": {"doc": "past output tokens kept for each tenant and task", "ge": 64},
        "max_past_tokens": {"doc": "past output tokens kept in all", "ge": 64},
    },
    HybridConfig: {
        "num_speculative_tokens": {"doc": "draft tokens a step, at most", "ge": 1, "le": 64},
        "assumed_accepted_tokens": {"doc": "of a draft of the model's, before the answer has shown", "ge": 0},
        "draft_cost": {"doc": "time of a draft of the model's, in target steps", "ge": 0},
        "share_past_outputs": {"doc": "as of suffix, whose settings count where that is loaded too"},
    },
    DraftModelConfig: {
        "num_speculative_tokens": {"doc": "draft tokens a step", "ge": 1, "le": 64},
        "source": {"doc": "folder, GGUF file, package:NAME, or shipped:NAME, a draft head that came along"},
        "layers_of_target": {"doc": "use the target's first N layers and its head", "ge": 1},
        "num_blocks": {"doc": "KV blocks of the draft; null: as many tokens as the target", "ge": 2},
        "catch_up_tokens": {"doc": "draft prefill a step", "ge": 1},
        "min_confidence": {
            "doc": "a draft ends before a token less likely than this to stand; 0: never",
            "ge": 0,
            "le": 0.99,
        },
    },
}
"""Meaning and limits of the engine's own settings, which are declared in `engine.config`."""
