"""Settings of what is told to other systems beside `/metrics`."""

# ruff: noqa: RUF009 - `setting` is `dataclasses.field` with a doc

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass

from specgate.config.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces, sent by OTLP over HTTP. Needs the extra `otel`. Never has a prompt's text."""

    endpoint: str = setting(
        MISSING, "where traces are sent, such as http://collector:4318/v1/traces", pattern=r"https?://\S+"
    )
    service_name: str = setting("specgate", "the resource attribute service.name")
    sample_ratio: float = setting(
        1.0, "share of requests that are traced; a caller's traceparent decides for its own", ge=0, le=1
    )
    headers: Mapping[str, str] = setting(dict, "sent along, such as an Authorization")
    export_every_s: float = setting(2.0, "between two sendings", gt=0)
    timeout_s: float = setting(5.0, "for one sending", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What is told to other systems beside `/metrics`."""

    tracing: TracingConfig | None = setting(None, "traces of requests; null: none")
