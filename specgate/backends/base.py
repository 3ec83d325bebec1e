"""The backend seam: whoever turns a prepared prompt into a stream of deltas.

Two phases of one request: `prepare` (encode, check it can fit) and `generate` (stream). The
stream is an async generator: closing it (client gone, stop string, deadline) aborts the work in
the backend within one step. Failures are errors of `specgate.errors`, before the first delta
or after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.types import EngineLoad, PolicyAssignment, SequenceStats, StepRecord
from specgate.policy.shut import Shut
from specgate.types import Delta, GenerationRequest, PreparedPrompt


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a backend serves. `methods` maps each loaded speculation method to its default number
    of draft tokens; baseline is always there and not listed."""

    model_id: str
    max_model_len: int
    methods: Mapping[str, int] = field(default_factory=dict)
    vocab_size: int | None = None
    created_s: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)  # device, dtype, kernels, blocks
    # True: the model runs on other servers, which get the caller's body and whose bytes are passed on.
    # `generate` is then called once a request, for all its answers; `max_model_len` 0: only they know.
    is_relay: bool = False


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Ready or not, and what is missing."""

    is_ready: bool
    detail: str  # "ready", "loading weights (42 %)", "engine restarting after SIGKILL", ...
    num_restarts: int = 0
    num_retries: int = 0  # answers begun again because the process that worked for them was lost
    retried_s: float = 0.0  # for how long they had been worked for, in vain
    is_final: bool = False  # it will not become ready by itself: `detail` says what to mend
    closed: Mapping[str, str] = field(default_factory=dict)  # policies that cannot run now: why


class Backend(Protocol):
    """One model, served somewhere."""

    @property
    def card(self) -> ModelCard: ...

    async def start(self) -> None:
        """Begin starting; returns at once. `status` tells when it is ready."""
        ...

    async def stop(self) -> None:
        """Abort what runs and free everything."""
        ...

    def status(self) -> BackendStatus: ...

    def load(self) -> EngineLoad: ...

    def describe(self) -> Mapping[str, Any]:
        """What operators are shown beside the card, as of now."""
        ...

    async def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        """Apply the chat template and encode. Raises BadRequest when it cannot fit."""
        ...

    def generate(
        self,
        request: GenerationRequest,
        prepared: PreparedPrompt,
        policy: PolicyAssignment,
        *,
        index: int,
        max_tokens: int,
        label: str,
        on_cut: Callable[[SequenceStats], None] | None = None,
    ) -> AsyncIterator[Delta]:
        """Answer number `index` to the request's prompt. `label` is the task, handed to the planner.

        If the stream ends before its last delta (closed, or failed), `on_cut` is given the counts
        of what was done until then, at the latest while the stream is being closed; never, if
        nobody is left who knows them.
        """
        ...

    def set_force(self, policy: str | None) -> None:
        """Kill switch: running requests follow at their next step. None lifts it."""
        ...

    def set_shut(self, entries: tuple[Shut, ...]) -> None:
        """Policies that may not draft: running requests follow at their next step. Replaces the last list."""
        ...

    async def set_loaded(self, method: str, is_loaded: bool) -> None:
        """Load a configured drafter, or unload it: its memory is freed, its requests go on as baseline.

        `card.methods` tells what is loaded. Raises BadRequest where there is no such drafter.
        """
        ...

    def push_snapshot(self, state: dict[str, Any]) -> None:
        """Fresh model state (`policy.view.ModelView.to_wire`) for whoever plans steps."""
        ...

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """Every engine step's record, in order; none for backends that cannot see steps."""
        ...

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def detokenize(self, token_ids: list[int]) -> str: ...
