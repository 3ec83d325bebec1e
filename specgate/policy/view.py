"""What was learned, frozen: the snapshot that decisions read and the engine's planner is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router_models.types import AcceptanceCurve, AcceptanceKey, StepCoefficients


@dataclass(frozen=True, slots=True)
class Traffic:
    """What ran of late, in averages. None: nothing ran yet."""

    between_steps_s: float = 0.0  # from the end of a step to the start of the next, while there is work
    prefill_extra_s: float = 0.0  # by how much other requests' prompts lengthen a decode step, on average
    sampled_share: float = 0.0  # of decoding sequences, those with temperature above 0
    kv_tokens: float | None = None  # per decoding sequence
    prompt_tokens: float | None = None  # per request
    computed_tokens: float | None = None  # of these, not found in the prefix cache; None: not told
    output_tokens: float | None = None
    max_chunk_tokens: float = 512.0  # most prompt tokens in one step


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How the step planner behaves; from the configuration."""

    is_following: bool = False  # only follow what was assigned per request
    switch_margin: float = 0.03
    probe_share: float = 0.01
    min_drafting_steps: float = 32.0  # a drafter seen in fewer steps is not chosen, only tried


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model's knowledge at one moment. `step` is None before any step was seen."""

    version: int = 0
    step: StepCoefficients | None = None
    curves: tuple[AcceptanceCurve, ...] = ()
    methods: dict[str, int] = field(default_factory=dict)  # loaded methods -> most draft tokens
    num_steps: dict[str, float] = field(default_factory=dict)  # by method: granted steps seen; faded
    traffic: Traffic = field(default_factory=Traffic)
    num_drifts: int = 0  # how often the machine was found to have changed its speed
    planner: PlannerSettings = field(default_factory=PlannerSettings)

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for the engine process."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state

    @classmethod
    def from_wire(cls, state: Mapping[str, Any]) -> ModelView:
        """What `to_wire` gave. Raises ValueError for anything else."""
        return msgspec.convert(state, cls)


class CurveBook:
    """Finds the curve for a policy, task and sampling band: the nearest that was published."""

    def __init__(self, curves: Iterable[AcceptanceCurve]) -> None:
        self.curves = tuple(curves)
        self._index = {curve.key: at for at, curve in enumerate(self.curves)}

    def index(self, policy: str, task: str | None, band: str) -> int | None:
        """Place in `curves`; the policy's average in that band where the task has none of its own."""
        found = self._index.get(AcceptanceKey(policy, task, band))
        return found if found is not None else self._index.get(AcceptanceKey(policy, None, band))

    def find(self, policy: str, task: str | None, band: str) -> AcceptanceCurve | None:
        """The curve, or None where nothing is known of the policy."""
        at = self.index(policy, task, band)
        return None if at is None else self.curves[at]
