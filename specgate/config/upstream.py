"""Settings of models that are served elsewhere, by OpenAI-compatible servers."""

# ruff: noqa: RUF009 - `setting` is `dataclasses.field` with a doc

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass

from specgate.config.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Servers that all do the same: one model, decoded in one way."""

    replicas: tuple[str, ...] = setting(
        MISSING, "base URLs without the trailing /v1, such as http://10.0.0.1:8000; the least loaded is asked"
    )
    model: str | None = setting(None, "the model's name there; null: as here")
    num_speculative_tokens: int = setting(
        4, "draft tokens a step of these servers, for predictions; not used by the pool baseline", ge=1, le=64
    )
    headers: Mapping[str, str] = setting(
        dict, "sent with every request, such as X-SpecGate-Policy where the servers are specgate themselves"
    )
    api_key_env: str | None = setting(None, "environment variable that holds these servers' API key")
    health_path: str = setting("/v1/models", "answers 2xx when a replica can serve", pattern=r"/\S*")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamTimeouts:
    """How long a server may take; each of its own."""

    connect_s: float = setting(2.0, "to accept a connection", gt=0)
    first_byte_s: float = setting(60.0, "of a stream: from the request to the first event", gt=0)
    gap_s: float = setting(60.0, "of a stream: between two pieces", gt=0)
    whole_s: float | None = setting(
        300.0, "an answer that is not streamed; null: as long as the request's deadline allows", gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """Second attempts: only before the first byte has gone out, and never more than a share."""

    max_attempts: int = setting(3, "attempts in one pool, the first among them", ge=1, le=10)
    budget_share: float = setting(0.1, "retries, as a share of requests", ge=0, le=1)
    budget_burst: int = setting(10, "retries that may come at once", ge=0)
    pause_s: float = setting(0.05, "before the same replica is asked again", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a replica is left alone. 4xx answers and clients that leave are no failures."""

    window: int = setting(20, "last attempts looked at", ge=1, le=1000)
    min_failures: int = setting(5, "failures among them, at least", ge=1)
    failure_share: float = setting(0.5, "and as a share of them, at least", gt=0, le=1)
    open_s: float = setting(5.0, "left alone this long, then one request tries it", gt=0)
    max_open_s: float = setting(60.0, "each further failure doubles that, up to this", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Replicas are asked for their health, request or not."""

    every_s: float = setting(2.0, "between two checks", gt=0)
    timeout_s: float = setting(2.0, "of one check", gt=0)
    max_failures: int = setting(2, "failures in a row before a replica counts as down", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIHttpConfig:
    """Pools of OpenAI-compatible servers behind one model name. The pool `baseline` decodes plainly and is
    what everything falls back to; each other pool stands for the policy of its name, such as ngram."""

    pools: Mapping[str, PoolConfig] = setting(MISSING, "by policy; baseline is required")
    max_model_len: int | None = setting(None, "context length; null: the servers know", ge=16)
    asks_usage: bool = setting(
        True, "streams are asked for token counts even if the caller does not want to see them"
    )
    max_retry_after_s: float = setting(30.0, "a longer Retry-After is cut to this", gt=0)
    timeouts: UpstreamTimeouts = setting(UpstreamTimeouts, UpstreamTimeouts.__doc__ or "")
    retries: RetryConfig = setting(RetryConfig, RetryConfig.__doc__ or "")
    breaker: BreakerConfig = setting(BreakerConfig, BreakerConfig.__doc__ or "")
    health: HealthConfig = setting(HealthConfig, HealthConfig.__doc__ or "")


def pool_faults(config: OpenAIHttpConfig) -> list[tuple[str, str]]:
    """(path below `openai_http`, message) for each fault that needs several settings to be seen."""
    faults = []
    if "baseline" not in config.pools:
        faults.append(("pools", "needs a pool named baseline: servers that decode plainly"))
    for name, pool in config.pools.items():
        at = f"pools.{name}"
        if name == "auto" or not name.replace("_", "").replace("-", "").isalnum() or name != name.lower():
            faults.append((at, "is named like no policy: use lower-case letters, digits, - and _"))
        if not pool.replicas:
            faults.append((f"{at}.replicas", "needs at least one URL"))
        for index, url in enumerate(pool.replicas):
            if wrong := _url_fault(url):
                faults.append((f"{at}.replicas.{index}", f"is {url!r}; {wrong}"))
            if url in pool.replicas[:index]:
                faults.append((f"{at}.replicas.{index}", f"{url} is given twice"))
        for header, value in pool.headers.items():
            if not header.replace("-", "").isalnum() or not value.isprintable():
                faults.append((f"{at}.headers.{header}", "is no HTTP header"))
    return faults


def _url_fault(url: str) -> str | None:
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest or rest.startswith("/"):
        return "must be like http://HOST:PORT"
    if any(sign in rest for sign in " ?#@"):
        return "must have no query, fragment, user or blank"
    return "leave out the trailing /v1" if rest.rstrip("/").endswith("/v1") else None
