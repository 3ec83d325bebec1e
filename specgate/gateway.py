"""The parts of a running gateway, as `build_app` put them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from specgate.api.parse import Parser
from specgate.api.parse_relay import RelayParser
from specgate.clock import Clock
from specgate.config import Config
from specgate.learning_loop import LearningLoop
from specgate.live import Live
from specgate.pipeline import Pipeline, ServedModel, Switches
from specgate.rate_limits import RateLimits
from specgate.rollouts import Rollouts
from specgate.telemetry.decision_log import DecisionLog
from specgate.telemetry.metrics import Metrics
from specgate.telemetry.recorder import Telemetry
from specgate.turnstile import Turnstile

if TYPE_CHECKING:
    from specgate.telemetry.tracing import Tracing  # needs packages that only tracing needs


@dataclass(slots=True)
class Gateway:
    """What handlers may use. Everything in it lives as long as the application; a reload exchanges
    the configuration and the parser."""

    live: Live
    clock: Clock
    models: Mapping[str, ServedModel]
    pipeline: Pipeline
    parser: Parser
    relay_parser: RelayParser
    turnstile: Turnstile
    switches: Switches
    metrics: Metrics
    log: DecisionLog
    telemetry: Telemetry
    learning: tuple[LearningLoop, ...]
    rollouts: Rollouts
    rates: RateLimits
    started_s: float
    tracing: Tracing | None = None

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.live.config

    def parser_of(self, body: Mapping[str, Any]) -> Parser:
        """Who reads this body: models that other servers run take what only those know."""
        name = body.get("model")
        model = self.models.get(name) if isinstance(name, str) else None
        return self.relay_parser if model is not None and model.backend.card.is_relay else self.parser

    def take(self, config: Config) -> None:
        """From now on this configuration."""
        self.live.replace(config)
        self.parser = Parser(config.requests)
        self.relay_parser = RelayParser(config.requests)

    def missing(self) -> dict[str, str]:
        """What keeps requests from being served: model -> why. Empty: ready."""
        out = {}
        for name, model in self.models.items():
            status = model.backend.status()
            if not status.is_ready:
                out[name] = status.detail
        if self.switches.takes_nothing:
            out["server"] = "draining"
        return out


GATEWAY = web.AppKey("gateway", Gateway)
