"""The composition root: everything is built here and handed down. Free of torch."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, disable_created_metrics

from engine.config import EngineConfig
from specgate import collector
from specgate.admission import Admission
from specgate.api import admin, canary, console, generate, operations
from specgate.api.connections import Runner, watched
from specgate.api.http import KeyCheck, add_request_id, errors, request_ids
from specgate.api.parse import Parser
from specgate.api.parse_relay import RelayParser
from specgate.backends.base import Backend
from specgate.backends.fake import FakeBackend
from specgate.backends.openai_http.backend import OpenAIHttpBackend
from specgate.clock import Clock, SystemClock
from specgate.config import Config, FakeConfig, ModelConfig
from specgate.consistency import ConsistencyChecker
from specgate.errors import ConfigError, Draining
from specgate.estimate import Estimator
from specgate.features import LearnedEstimator
from specgate.gateway import GATEWAY, Gateway
from specgate.guarding import Guarding, GuardSurroundings
from specgate.learning import Learner
from specgate.learning_loop import LearningLoop
from specgate.live import Live
from specgate.live_readings import live_reader
from specgate.load import LoadMeter
from specgate.pipeline import Pipeline, ServedModel, Switches
from specgate.policy.guard_costs import LatestCosts
from specgate.rate_limits import RateLimits
from specgate.reload import RELOADER, Reloader
from specgate.rollout_store import RolloutStore
from specgate.rollouts import Rollouts, load_rollouts
from specgate.switch_store import load_force
from specgate.telemetry.decision_log import DecisionLog
from specgate.telemetry.device import find_gpus
from specgate.telemetry.faults import FaultLog
from specgate.telemetry.logs import set_up_logging
from specgate.telemetry.metrics import Metrics
from specgate.telemetry.process import ProcessReader
from specgate.telemetry.recorder import Telemetry
from specgate.turnstile import Turnstile
from specgate.watch import Watch

if TYPE_CHECKING:
    from specgate.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # for requests that are cut off to say so


def build_app(
    config: Config,
    *,
    clock: Clock | None = None,
    registry: CollectorRegistry | None = None,
    backends: Mapping[str, Backend] | None = None,
    estimator: Estimator | None = None,
    reread: Callable[[], Config] | None = None,
) -> web.Application:
    """The whole gateway. `backends` by model id, for tests; else they are made as configured.
    `reread` gives the configuration as its file is now, for reloads.

    To notice clients that go away before their answer, serve it by `make_runner`.
    """
    clock = clock or SystemClock()
    live = Live(config)
    rates = RateLimits(live.limits_of, clock)
    models: dict[str, ServedModel] = {}
    force_path = config.guards.force_path
    switches = Switches(forced_policy=load_force(Path(force_path)) if force_path is not None else None)
    process = ProcessReader(clock)
    metrics = Metrics(registry or CollectorRegistry(), live_reader(models, process, find_gpus(config.models)))
    log = DecisionLog(config.decision_log, clock)
    telemetry = Telemetry(metrics, log, clock, lambda: live.config.costs)
    loops = []
    for model in config.models:
        learner = Learner(config.policy, config.learning, metrics.predicted)
        loop = LearningLoop(model, learner, config.learning, metrics, clock)
        sweep_s = 0.0 if loop.has_latency_model else config.learning.sweep_s
        backend = backends[model.id] if backends is not None else _build_backend(model, clock, sweep_s)
        loop.attach(backend)
        loops.append(loop)
        backend.on_step(metrics.stepped)
        if isinstance(backend, OpenAIHttpBackend):
            backend.on_attempt(metrics.attempted)
        backend.on_step(FaultLog(model.id, clock, telemetry.events).stepped)
        backend.on_step(partial(telemetry.history.stepped, model.id))
        if switches.forced_policy is not None:
            backend.set_force(switches.forced_policy)
        admission = Admission(config.admission, clock, live.limits_of, lambda: live.has_many_keys)
        guards = _guarding(config, backend, learner, telemetry, clock, process)
        models[model.id] = ServedModel(
            id=model.id,
            backend=backend,
            admission=admission,
            meter=LoadMeter(clock, config.policy.window_s, config.policy.min_window_samples),
            learner=learner,
            guards=guards,
            checker=_checker(config, backend, admission, guards, telemetry),
        )
    rollouts = Rollouts(
        load_rollouts(config.canary),
        RolloutStore(Path(config.canary.state_path)),
        metrics,
        clock,
        telemetry.events,
    )
    gateway = Gateway(
        live=live,
        clock=clock,
        models=models,
        pipeline=Pipeline(
            models,
            live,
            switches,
            estimator or LearnedEstimator(),
            telemetry,
            clock,
            rollouts,
            rates,
        ),
        parser=Parser(config.requests),
        relay_parser=RelayParser(config.requests),
        turnstile=Turnstile(),
        switches=switches,
        metrics=metrics,
        log=log,
        telemetry=telemetry,
        learning=tuple(loops),
        rollouts=rollouts,
        rates=rates,
        started_s=clock.monotonic(),
        tracing=_tracing(config, clock),
    )
    keys = KeyCheck(live)
    middlewares: list[Middleware] = [watched, request_ids, errors, keys.middleware]
    app = web.Application(middlewares=middlewares)
    app[GATEWAY] = gateway
    app[RELOADER] = Reloader(gateway, reread, set_up_logging)
    app.on_response_prepare.append(add_request_id)
    app.cleanup_ctx.append(_run_backends)
    _add_routes(app)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler when its client is gone, and cuts off clients that are too slow."""
    gateway = app[GATEWAY]
    return Runner(app, lambda: gateway.config.server, shutdown_timeout=_LAST_WORDS_S)


def run(config: Config, reread: Callable[[], Config] | None = None) -> int:
    """`serve` on the fast event loop; what the command line calls. Returns the exit code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, reread))


async def serve(
    config: Config,
    reread: Callable[[], Config] | None = None,
    *,
    build: Callable[..., web.Application] = build_app,
) -> int:
    """Run until SIGTERM or SIGINT; prints one line when it can answer. Returns the exit code.

    With `reread` SIGHUP reloads the configuration. Raises OSError when the address cannot be bound.
    """
    set_up_logging(config.logging)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    app = build(config, reread=reread)
    gateway = app[GATEWAY]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, gateway, stop)
    if reread is not None:
        loop.add_signal_handler(signal.SIGHUP, app[RELOADER].begin)
    runner = make_runner(app)
    try:
        await runner.setup()
        site = web.TCPSite(runner, config.server.host, config.server.port, backlog=1024)
        await site.start()
        if not await _until_ready(gateway, stop):
            return 1
        collector.settle()
        if not stop.is_set():
            print(f"specgate ready on {_url(runner)}", flush=True)  # noqa: T201 - the contract's one line
        await stop.wait()
        await _drain(gateway)
        return 0
    finally:
        await runner.cleanup()


def _on_signal(gateway: Gateway, stop: asyncio.Event) -> None:
    """The first signal drains; the second ends at once."""
    if stop.is_set():
        gateway.switches.is_hurried = True
    gateway.switches.is_stopping = True
    stop.set()


async def _until_ready(gateway: Gateway, stop: asyncio.Event) -> bool:
    """False when a model will never become ready by waiting."""
    while gateway.missing() and not stop.is_set():
        for name, model in gateway.models.items():
            status = model.backend.status()
            if status.is_final:
                logger.error("the model %s cannot be served: %s", name, status.detail)
                return False
        await asyncio.sleep(_POLL_S)
    return True


async def _drain(gateway: Gateway) -> None:
    """Running requests may finish, within the grace time."""
    clock, grace_s = gateway.clock, gateway.config.server.drain_grace_s
    text = "stopping: %d running requests may finish within %g s; a second signal ends them at once"
    logger.info(text, gateway.pipeline.num_open, grace_s)
    ends_s = clock.monotonic() + grace_s
    while gateway.pipeline.num_open and not gateway.switches.is_hurried:
        if clock.monotonic() >= ends_s:
            logger.warning("%d requests did not finish within %g s", gateway.pipeline.num_open, grace_s)
            break
        await asyncio.sleep(_POLL_S)
    gateway.pipeline.cut_off(Draining("The server was stopped before the answer was whole."))


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _run_backends(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    for model in gateway.models.values():
        await model.backend.start()
    for loop in gateway.learning:
        loop.start()
    checkers = [model.checker for model in gateway.models.values()]
    watch = Watch(gateway.models, gateway.rollouts, checkers, gateway.telemetry)
    watch.start()
    gateway.telemetry.events.add("server", "the server started")
    yield
    await watch.stop()
    for loop in gateway.learning:
        await loop.stop()
    for model in gateway.models.values():
        await model.backend.stop()
    gateway.log.close()
    if gateway.tracing is not None:
        await gateway.tracing.stop()


def _tracing(config: Config, clock: Clock) -> Tracing | None:
    """None unless asked for: then nothing of it is even imported."""
    if config.telemetry.tracing is None:
        return None
    try:
        from specgate.telemetry.tracing import build_tracing
    except ImportError as error:
        fault = "telemetry.tracing: needs OpenTelemetry: pip install 'specgate-gateway[otel]'"
        raise ConfigError([fault]) from error
    return build_tracing(config.telemetry.tracing, clock)


def _build_backend(model: ModelConfig, clock: Clock, sweep_s: float) -> Backend:
    if model.backend == "fake":
        return FakeBackend(model.id, model.fake or FakeConfig(), clock)
    if model.backend == "openai_http":
        assert model.openai_http is not None  # checked with the configuration
        return OpenAIHttpBackend(model.id, model.openai_http, clock)
    from specgate.backends.embedded.backend import EmbeddedBackend, EmbeddedConfig
    from specgate.backends.embedded.supervisor import Supervision

    supervision = Supervision(
        load_timeout_s=model.supervision.load_timeout_s, hang_timeout_s=model.supervision.hang_timeout_s
    )
    engine = model.engine or EngineConfig()
    return EmbeddedBackend(EmbeddedConfig(model.id, engine, supervision, sweep_s=sweep_s), clock)


def _guarding(
    config: Config,
    backend: Backend,
    learner: Learner,
    telemetry: Telemetry,
    clock: Clock,
    process: ProcessReader,
) -> Guarding:
    guards = Guarding(
        config.guards,
        config.policy,
        GuardSurroundings(
            backend,
            telemetry.metrics,
            clock,
            costs=LatestCosts(lambda: learner.view),
            memory_bytes=process.memory_bytes,
            events=telemetry.events,
        ),
    )
    backend.on_step(guards.stepped)
    if isinstance(backend, OpenAIHttpBackend):
        backend.on_attempt(guards.attempted)
    return guards


def _checker(
    config: Config, backend: Backend, admission: Admission, guards: Guarding, telemetry: Telemetry
) -> ConsistencyChecker:
    def told(policy: str, result: str) -> None:
        telemetry.metrics.checked(result)
        if result != "abandoned":
            guards.checked(policy, result == "match")

    return ConsistencyChecker(
        config.guards.consistency,
        backend,
        lambda: admission.num_running == 0 and admission.num_queued == 0,
        guards.wants_check,
        told,
        partial(telemetry.checked, backend.card.model_id),
    )


def _add_routes(app: web.Application) -> None:
    ui = console.Console()
    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.completions),
            web.get("/v1/models", operations.models),
            web.get("/v1/models/{id:.+}", operations.model),
            web.post("/tokenize", operations.tokenize),
            web.post("/detokenize", operations.detokenize),
            web.get("/healthz", operations.healthz),
            web.get("/readyz", operations.readyz),
            web.get("/metrics", operations.metrics),
            web.get("/version", operations.version),
            web.get("/openapi.json", operations.openapi),
            web.get("/ui", ui.page),
            web.get("/ui/{name:.*}", ui.file),
            web.get("/admin/state", admin.state),
            web.get("/admin/events", console.events),
            web.get("/admin/history", console.history),
            web.get("/admin/predictions", console.predictions),
            web.post("/admin/explain", admin.explain),
            web.get("/admin/decisions", admin.decisions),
            web.put("/admin/policy", admin.policy),
            web.put("/admin/drafters", admin.drafters),
            web.post("/admin/drain", admin.drain),
            web.post("/admin/reload", admin.reload),
            web.post("/admin/canary/{name}/{action}", canary.act),
        ]
    )
