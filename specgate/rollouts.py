"""The rollouts at work: which arm a request is in, what its outcome says, what operators do.

`policy.canary` decides; here are the files, the clock, the metrics and the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specgate.clock import Clock
from specgate.config import CanaryConfig, load_rollout
from specgate.config.rollout import RolloutConfig
from specgate.errors import BadRequest, ConfigError, Conflict, NotFound
from specgate.policy.canary import ACTIONS, ActionRefused, Event, Rollout, Status
from specgate.policy.guardrails import ArmSample
from specgate.policy.overlay import (
    ArmAssignment,
    concerns,
    conflict,
    definition,
    header_names,
    key_of,
    unknown_names,
)
from specgate.rollout_store import RolloutStore, StoreError, digest
from specgate.telemetry.events import Events, Level
from specgate.types import GenerationRequest, RequestOutcome

logger = logging.getLogger(__name__)

_SAVE_EVERY_S = 10.0  # evidence; changes of stage are saved at once


class RolloutMetrics(Protocol):
    """Where rollouts are shown."""

    def rollout_moved(self, name: str, stage: int, share: float, status: str) -> None: ...

    def arm_finished(self, name: str, arm: str, outcome: RequestOutcome) -> None: ...


class Rollouts:
    """All of them. One that conflicts with an earlier one, or has no usable state, is refused."""

    def __init__(
        self,
        configs: Sequence[RolloutConfig],
        store: RolloutStore | None,
        metrics: RolloutMetrics,
        clock: Clock,
        events: Events | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._events = events
        self._rollouts: dict[str, Rollout] = {}
        self.refused: dict[str, str] = {}
        self._kept: dict[str, dict[str, Any]] = {}  # states of rollouts whose files are gone
        self._is_dirty = False
        self._saved_s = clock.monotonic()
        self._is_broken = False
        try:
            states = store.load() if store is not None else {}
        except StoreError as error:
            logger.error("no rollout runs: %s", error)
            self.refused = {config.rollout: f"The state {error}." for config in configs}
            self._store = None
            self._is_unreadable = True
            return
        self._start(configs, states)

    _is_unreadable = False
    header_names: frozenset[str] = frozenset()

    def replace(self, configs: Sequence[RolloutConfig]) -> None:
        """These and no others from now on. One that is as it was goes on, one that changed begins anew."""
        if self._is_unreadable:
            self.refused = {config.rollout: "The state was not readable at the start." for config in configs}
            return
        states = self._kept | self._states()
        wanted = {config.rollout: digest(definition(config)) for config in configs}
        for name, rollout in list(self._rollouts.items()):
            if wanted.get(name) != digest(definition(rollout.config)):
                del self._rollouts[name]
            if name not in wanted:
                self._metrics.rollout_moved(name, 0, 0.0, "removed")
                logger.info("the rollout %s is gone: its file was removed", name)
        self.refused = {}
        self._start(configs, states)
        self._is_dirty = True

    def assign(self, request: GenerationRequest, task: str) -> ArmAssignment | None:
        """The arm this request is in; None: in none."""
        for rollout in self._rollouts.values():
            config = rollout.config
            if rollout.is_active and concerns(config.scope, request, task):
                arm = rollout.arm(key_of(config, request))
                return None if arm is None else ArmAssignment(rollout.name, arm, config.overlay)
        return None

    def finished(self, outcome: RequestOutcome) -> None:
        """A request has ended; those of an arm are evidence."""
        decision = outcome.decision
        if decision.rollout is None or decision.arm is None:
            return
        self._metrics.arm_finished(decision.rollout, decision.arm, outcome)
        rollout = self._rollouts.get(decision.rollout)
        sample = _sample(outcome)
        if rollout is None or sample is None:
            return
        self._is_dirty = True
        self._note(rollout, rollout.observe(decision.arm, sample, self._clock.wall()))

    def tick(self, methods: Mapping[str, Mapping[str, int]]) -> None:
        """Stages that are due, and expiries. `methods`: what each ready model has loaded."""
        for rollout in self._rollouts.values():
            self._check_names(rollout, methods)
            self._note(rollout, rollout.advance(self._clock.wall()))

    async def act(self, name: str, action: str) -> dict[str, Any]:
        """An operator's word. Raises NotFound, BadRequest or Conflict."""
        if action not in ACTIONS:
            raise BadRequest(
                f"There is no action {action[:40]!r}; there are: {', '.join(ACTIONS)}.", "action"
            )
        rollout = self._rollouts.get(name)
        if rollout is None:
            if name in self.refused:
                raise Conflict(self.refused[name])
            known = ", ".join(self._rollouts) or "none"
            raise NotFound(
                f"There is no rollout {name[:100]!r}; there are: {known}.", code="rollout_not_found"
            )
        if not rollout.is_active and (why := self._conflict(rollout.config)) is not None:
            raise Conflict(why)
        try:
            self._note(rollout, rollout.act(action, self._clock.wall()))
        except ActionRefused as error:
            raise Conflict(str(error)) from error
        await self.save()
        return self.describe()[name]

    def describe(self) -> dict[str, dict[str, Any]]:
        """By name, the refused ones too; for /admin/state."""
        out = {name: rollout.describe(self._clock.wall()) for name, rollout in self._rollouts.items()}
        return out | {name: {"status": "refused", "why": why} for name, why in self.refused.items()}

    async def save(self) -> None:
        """Now. A disk that is full or gone is said once, and tried again."""
        if self._store is None:
            return
        self._is_dirty, self._saved_s = False, self._clock.monotonic()
        states = self._kept | self._states()
        try:
            await asyncio.to_thread(self._store.save, states)
            self._is_broken = False
        except OSError as error:
            self._is_dirty = True
            if not self._is_broken:
                logger.error("the state of rollouts cannot be written to %s: %s", self._store.path, error)
            self._is_broken = True

    async def save_if_dirty(self) -> None:
        """A last time."""
        if self._is_dirty:
            await self.save()

    async def save_if_due(self) -> None:
        """When evidence has gathered since the last time."""
        if self._is_dirty and self._clock.monotonic() - self._saved_s >= _SAVE_EVERY_S:
            await self.save()

    def _states(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"definition": digest(definition(rollout.config)), **rollout.state()}
            for name, rollout in self._rollouts.items()
        }

    def _start(self, configs: Sequence[RolloutConfig], states: Mapping[str, dict[str, Any]]) -> None:
        """Those that do not run yet."""
        self._kept = {n: s for n, s in states.items() if n not in {c.rollout for c in configs}}
        for config in configs:
            if config.rollout not in self._rollouts:
                self._begin(config, states.get(config.rollout))
        self.header_names = frozenset(n for r in self._rollouts.values() for n in header_names(r.config))

    def _begin(self, config: RolloutConfig, state: Mapping[str, Any] | None) -> None:
        rollout = Rollout(config, self._clock.wall())
        is_same = state is not None and state.get("definition") == digest(definition(config))
        if state is not None and is_same:
            try:
                rollout.load(state)
            except ValueError as error:
                self.refused[config.rollout] = f"Its saved state cannot be used: {error}."
                logger.error("the rollout %s does not run: %s", config.rollout, error)
                return
        if rollout.is_active and (why := self._conflict(config)) is not None:
            self.refused[config.rollout] = why
            logger.error("the rollout %s does not run: %s", config.rollout, why)
            return
        self._rollouts[config.rollout] = rollout
        began = "goes on" if is_same else "begins"
        logger.info("the rollout %s %s: %s, stage %d", config.rollout, began, rollout.status, rollout.stage)
        self._metrics.rollout_moved(rollout.name, rollout.stage, rollout.share, rollout.status)
        self._is_dirty = True
        self._saved_s = -_SAVE_EVERY_S

    def _check_names(self, rollout: Rollout, methods: Mapping[str, Mapping[str, int]]) -> None:
        """An overlay that names what is not loaded would quietly do nothing."""
        for model, loaded in methods.items():
            scope = rollout.config.scope.models
            unknown = unknown_names(rollout.config, loaded)
            if rollout.is_active and (not scope or model in scope) and unknown:
                there = ", ".join(loaded) or "none"
                why = f"{', '.join(unknown)}: not loaded in {model}; loaded: {there}"
                self._note(rollout, rollout.give_up(why, self._clock.wall()))

    def _conflict(self, config: RolloutConfig) -> str | None:
        for other in self._rollouts.values():
            if other.is_active and other.name != config.rollout and (why := conflict(config, other.config)):
                return why
        return None

    def _note(self, rollout: Rollout, event: Event | None) -> None:
        if event is None:
            return
        level = logging.WARNING if event.status is Status.ROLLED_BACK else logging.INFO
        where = f"stage {event.stage + 1} of {len(rollout.config.stages_percent)}, {rollout.share:.0%}"
        logger.log(level, "the rollout %s is %s (%s): %s", event.rollout, event.status, where, event.why)
        if self._events is not None:
            told: Level = "warning" if event.status is Status.ROLLED_BACK else "info"
            said = f"{event.rollout} is {event.status} ({where}): {event.why}"
            self._events.add("rollout", said, told, subject=event.rollout)
        self._metrics.rollout_moved(rollout.name, rollout.stage, rollout.share, rollout.status)
        self._is_dirty = True
        self._saved_s = -_SAVE_EVERY_S


def load_rollouts(config: CanaryConfig) -> list[RolloutConfig]:
    """All files of the folder, by name. Raises ConfigError."""
    if config.folder is None:
        return []
    folder = Path(config.folder)
    if not folder.is_dir():
        raise ConfigError([f"canary.folder: {folder} is no folder"])
    faults: list[str] = []
    found: dict[str, Path] = {}
    rollouts = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            rollout = load_rollout(path)
        except ConfigError as error:
            faults += error.faults
            continue
        if rollout.rollout in found:
            faults.append(
                f"{path}: rollout: {rollout.rollout!r} is already the name in {found[rollout.rollout]}"
            )
        found[rollout.rollout] = path
        rollouts.append(rollout)
    if faults:
        raise ConfigError(faults)
    return rollouts


def _sample(outcome: RequestOutcome) -> ArmSample | None:
    """None for those that say nothing of the arm: clients that left, requests refused."""
    if outcome.outcome not in ("ok", "error", "deadline"):
        return None
    timings = outcome.timings
    return ArmSample(
        num_prompt_tokens=outcome.num_prompt_tokens,
        num_output_tokens=outcome.num_output_tokens,
        ttft_s=timings.ttft_s,
        tpot_s=timings.tpot_s,
        e2e_s=timings.e2e_s,
        queue_wait_s=timings.queue_wait_s,
        num_accepted=sum(sum(stats.accepted_per_position) for stats in outcome.stats),
        num_reached=sum(sum(stats.drafted_per_position) for stats in outcome.stats),
        is_error=outcome.outcome != "ok",
    )
