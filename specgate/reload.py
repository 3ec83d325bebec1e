"""The configuration exchanged while the server runs: all of it, or nothing.

What cannot change without a restart is named and refused, and so is a file with a fault; either
way the old configuration stays in force.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from specgate.config import Config, LoggingConfig
from specgate.config.rollout import RolloutConfig
from specgate.errors import ApiError, ConfigError, InvalidConfig, RestartNeeded
from specgate.gateway import Gateway
from specgate.rollouts import load_rollouts

logger = logging.getLogger(__name__)

LIVE = (
    "server", "auth", "requests", "admission", "policy", "guards", "canary", "decision_log", "logging",
    "costs",
)  # fmt: skip
RESTART_ONLY = ("server.host", "server.port", "guards.force_path", "canary.state_path")
"""Exceptions within those sections. A section that is not listed as live needs a restart."""


def changes(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Paths of the settings that differ, as deep as both sides have the same shape."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        for field in dataclasses.fields(old):
            at = f"{path}.{field.name}" if path else field.name
            yield from changes(getattr(old, field.name), getattr(new, field.name), at)
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for index, (was, is_now) in enumerate(zip(old, new, strict=True)):
            yield from changes(was, is_now, f"{path}.{index}" if dataclasses.is_dataclass(was) else path)
    elif old != new:
        yield path


def needs_restart(path: str) -> bool:
    """Whether a change of this setting cannot be applied to a running server."""
    return path.partition(".")[0] not in LIVE or path in RESTART_ONLY


class Reloader:
    """Of one gateway. `read` gives the configuration as its file is now; None: there is no file."""

    def __init__(
        self,
        gateway: Gateway,
        read: Callable[[], Config] | None,
        set_logging: Callable[[LoggingConfig], None] = lambda _config: None,
    ) -> None:
        self._gateway = gateway
        self._read = read
        self._set_logging = set_logging
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """On a signal: reload, and tell the log alone."""
        self._task = asyncio.get_running_loop().create_task(self._reload_quietly(), name="reload")

    async def reload(self) -> tuple[str, ...]:
        """Apply the file as it is now; the settings that changed. Raises InvalidConfig or
        RestartNeeded, and then nothing has changed."""
        async with self._one_at_a_time:
            try:
                changed = await self._try()
            except ApiError as error:
                self._gateway.metrics.reloaded(error.default_code or "error")
                logger.error("the configuration stays as it was: %s", error.message)
                self._gateway.telemetry.events.add("config", f"stays as it was: {error.message}", "error")
                raise
        self._gateway.metrics.reloaded("ok")
        said = ", ".join(changed) or "nothing"
        logger.info("the configuration was reloaded; changed: %s", said)
        self._gateway.telemetry.events.add("config", f"reloaded; changed: {said}")
        return changed

    async def _reload_quietly(self) -> None:
        try:
            await self.reload()
        except ApiError:
            pass  # told in the log and counted

    async def _try(self) -> tuple[str, ...]:
        if self._read is None:
            raise InvalidConfig("This server was not started from a file: start it with --config FILE.")
        try:
            config, rollouts = await asyncio.to_thread(_read_all, self._read)
        except ConfigError as error:
            raise InvalidConfig("; ".join(error.faults)) from None
        changed = tuple(dict.fromkeys(changes(self._gateway.config, config)))
        fixed = [path for path in changed if needs_restart(path)]
        if fixed:
            raise RestartNeeded(f"Restart needed to change {', '.join(fixed)}; nothing was changed.")
        self._apply(config, rollouts)
        return changed

    def _apply(self, config: Config, rollouts: list[RolloutConfig]) -> None:
        """Nothing here waits or fails: requests see the old configuration or the new one."""
        gateway = self._gateway
        if config.logging != gateway.config.logging:
            self._set_logging(config.logging)
        gateway.take(config)
        for model in gateway.models.values():
            model.admission.reconfigure(config.admission)
            model.meter.reconfigure(config.policy.window_s, config.policy.min_window_samples)
            model.learner.reconfigure(config.policy)
            model.guards.reconfigure(config.guards, config.policy)
            model.checker.reconfigure(config.guards.consistency)
        gateway.log.reconfigure(config.decision_log)
        gateway.rollouts.replace(rollouts)


def _read_all(read: Callable[[], Config]) -> tuple[Config, list[RolloutConfig]]:
    config = read()
    return config, load_rollouts(config.canary)


RELOADER = web.AppKey("reloader", Reloader)
