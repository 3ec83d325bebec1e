"""A scripted backend: exact tokens, delays and failures, no model. For tests, load and rehearsal.

A token is one character and its id the code point, so texts and token ids are easy to foresee.
Speculation is acted out: under a method every step emits 1 + min(depth, accepted_per_draft)
tokens, with the counts a real engine would report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from engine.stats import SequenceCounters
from engine.types import (
    BASELINE,
    DraftWork,
    EngineLoad,
    PolicyAssignment,
    PolicyChange,
    SequenceStats,
    StepRecord,
)
from specgate.backends.base import BackendStatus, ModelCard
from specgate.backends.embedded.origins import Origins
from specgate.backends.embedded.stop import StopFinder
from specgate.clock import Clock
from specgate.config import FakeConfig
from specgate.errors import BadRequest, ContextTooLong, EngineLost, NotReady, UnsupportedParameter
from specgate.policy.shut import Shut, ShutList
from specgate.types import Delta, DeltaLogprob, GenerationRequest, PreparedPrompt

VOCAB_SIZE = 0x110000
_NUM_BLOCKS, _BLOCK_SIZE = 4096, 16


class FakeBackend:
    """Implements `specgate.backends.base.Backend`. `script` and `is_ready` may be changed at any time."""

    def __init__(self, model_id: str, script: FakeConfig, clock: Clock, *, is_ready: bool = True) -> None:
        self.script = script
        self.is_ready = is_ready
        self.num_started = 0  # generations begun, ever
        self.num_running = 0  # generations open now
        self._clock = clock
        self._forced: str | None = None
        self._shut = ShutList()
        self._listeners: list[Callable[[StepRecord], None]] = []
        self._step = 0
        self._used_tokens = 0
        self._card = ModelCard(
            model_id, script.max_model_len, dict(script.methods), VOCAB_SIZE,
            int(clock.wall()), {"device": "none", "backend": "fake"},
        )  # fmt: skip

    @property
    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to free."""

    def status(self) -> BackendStatus:
        return BackendStatus(self.is_ready, "ready" if self.is_ready else "made not ready by its script")

    def load(self) -> EngineLoad:
        used = -(-self._used_tokens // _BLOCK_SIZE)
        return EngineLoad(self.num_running, 0, _NUM_BLOCKS - used, 0, used, _NUM_BLOCKS)

    def describe(self) -> dict[str, Any]:
        return {}

    async def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        """Messages become `role: content` lines."""
        _refuse_formats(request)
        if not self.is_ready:
            raise NotReady("the fake backend was made not ready")
        if request.messages is not None:
            text = "".join(f"{m['role']}: {m['content']}\n" for m in request.messages)
            if request.chat_template_kwargs.get("add_generation_prompt", True):
                text += "assistant: "
            param = "messages"
        else:
            param = "prompt"
            prompt = request.prompt or ""
            text = prompt if isinstance(prompt, str) else self.detokenize(list(prompt))
        if not text:
            raise BadRequest("'prompt' must hold at least one token.", param)
        if len(text) >= self._card.max_model_len:
            raise ContextTooLong(
                f"{param!r} has {len(text)} tokens; the context is {self._card.max_model_len}.", param
            )
        return PreparedPrompt(tuple(map(ord, text)), text, first_token=text[0])

    async def generate(
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
        """Plays the script; see `Backend.generate`."""
        self.num_started += 1
        self.num_running += 1
        held = len(prepared.token_ids) + max_tokens
        self._used_tokens += held
        answer = _Answer(request, self.script, max_tokens, len(prepared.token_ids))
        is_over = False
        try:
            await asyncio.sleep(self.script.prefill_s)
            while not is_over:
                is_first = answer.num_out == 0
                await self._stumble(answer.num_out)
                await asyncio.sleep(self.script.step_s)
                depth = self._depth(policy, answer, label)
                delta = answer.step(policy.method, depth)
                self._record(policy.method if depth else BASELINE, depth, delta)
                is_over = delta.finish_reason is not None
                yield replace(delta, queue_wait_s=0.0) if is_first else delta
        finally:
            if not is_over and on_cut is not None:
                on_cut(answer.stats())
            self.num_running -= 1
            self._used_tokens -= held

    def set_force(self, policy: str | None) -> None:
        self._forced = policy

    def set_shut(self, entries: tuple[Shut, ...]) -> None:
        self._shut = ShutList(entries)

    async def set_loaded(self, method: str, is_loaded: bool) -> None:
        """The script's methods cannot go."""
        raise BadRequest("The fake backend has no drafters to load or unload.", "method")

    def push_snapshot(self, state: dict[str, Any]) -> None:
        """Nobody plans steps here: the script does."""

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        self._listeners.append(listener)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, token_ids: list[int]) -> str:
        return "".join("\ufffd" if 0xD800 <= i < 0xE000 or i >= VOCAB_SIZE else chr(i) for i in token_ids)

    async def _stumble(self, num_out: int) -> None:
        script = self.script
        if script.fail_after_tokens is not None and num_out >= script.fail_after_tokens:
            raise EngineLost("the fake backend failed as scripted")
        if script.hang_after_tokens is not None and num_out >= script.hang_after_tokens:
            await asyncio.Event().wait()

    def _depth(self, policy: PolicyAssignment, answer: _Answer, label: str) -> int:
        if self._forced is not None and policy.method != self._forced and policy.num_speculative_tokens:
            answer.note_change(self._forced, "kill_switch")
            return 0
        shut = self._shut.refusal(policy.method, label, policy)
        if shut is not None and policy.num_speculative_tokens:
            answer.note_change(BASELINE, shut.reason.value)
            return 0
        if answer.changes:
            answer.note_change(policy.method, "override" if policy.is_exact else "rule")
        return max(0, min(policy.num_speculative_tokens, answer.num_left - 1))

    def _record(self, method: str, depth: int, delta: Delta) -> None:
        self._step += 1
        if not self._listeners:
            return
        seconds, accepted = self.script.step_s, delta.num_accepted
        work = (DraftWork(method, 0, 1, depth, accepted, 0, seconds / 4),) if depth else ()
        record = StepRecord(
            step=self._step,
            started_s=self._clock.monotonic() - seconds,
            seconds=seconds,
            kind="verify" if depth else "decode",
            num_sequences=1,
            num_decode_sequences=1,
            num_tokens=depth + 1,
            num_prefill_tokens=0,
            num_kv_tokens=0,
            num_logits_rows=depth + 1,
            num_sampled_rows=0,
            num_emitted_tokens=delta.num_tokens,
            schedule_s=0.0,
            draft_s=seconds / 4,
            forward_s=seconds / 2,
            verify_s=seconds / 4,
            drafts=work,
        )
        for listener in self._listeners:
            listener(record)


class _Answer:
    """One answer being played: text, tokens and counts, cut at the same token."""

    def __init__(
        self, request: GenerationRequest, script: FakeConfig, max_tokens: int, num_prompt: int
    ) -> None:
        self._request = request
        self._script = script
        self._max_tokens = max_tokens
        self._num_prompt = num_prompt
        self._stops = StopFinder(request.stop)
        self._origins = Origins() if request.has_trace else None
        self.num_out = 0
        self._counters = SequenceCounters()
        self.changes: list[PolicyChange] = []

    @property
    def num_left(self) -> int:
        """Tokens until the limit."""
        return self._max_tokens - self.num_out

    def note_change(self, policy: str, reason: str) -> None:
        """The policy from the next token on, if it differs from the last noted."""
        if not self.changes or self.changes[-1].policy != policy:
            self.changes.append(PolicyChange(self.num_out, policy, reason))

    def step(self, method: str, depth: int) -> Delta:
        """One step's delta: 1 + accepted tokens, fewer where the answer ends."""
        accepted = min(depth, self._script.accepted_per_draft)
        first, piece, shown = self.num_out, "", ""
        finish: str | None = None
        stop_reason: str | int | None = None
        if self._max_tokens == 0:
            finish = "length"
        while len(piece) < accepted + 1 and finish is None:
            piece += self._next_char(first + len(piece))
            if self._origins is not None:
                self._origins.add(piece[-1], method if len(piece) <= accepted else None)
            text, finish, stop_reason = self._take(piece[-1], first + len(piece))
            shown += text
        self.num_out += len(piece)
        accepted = min(accepted, len(piece))
        self._counters.num_target_steps += bool(piece)
        self._counters.charge_decode(
            method if depth > 0 else BASELINE,
            len(piece),
            *(share * self._script.step_s for share in (0.25 if depth > 0 else 0.0, 0.5, 0.25)),
        )
        if depth > 0:
            self._counters.grant(method)
            self._counters.add_draft(depth, accepted, len(piece), method, depth)
        tokens = tuple(map(ord, piece))
        with_prompt = first == 0 and self._request.sampling.has_prompt_logprobs
        return Delta(
            text=shown,
            num_tokens=len(piece),
            num_accepted=accepted,
            token_ids=tokens,
            logprobs=tuple(self._logprob(t) for t in tokens) if self._wants_logprobs() else (),
            prompt_logprobs=self._prompt_logprobs() if with_prompt else (),
            finish_reason=finish,
            stop_reason=stop_reason,
            stats=self.stats() if finish else None,
            pieces=self._origins.take(shown) if self._origins is not None else (),
        )

    def _next_char(self, position: int) -> str:
        text = self._script.text or " "
        return text[position % len(text)]

    def _take(self, char: str, num_out: int) -> tuple[str, str | None, str | int | None]:
        """Text that may be shown, finish reason, stop reason, after token number `num_out`."""
        sampling = self._request.sampling
        can_stop = num_out > sampling.min_tokens
        if can_stop and ord(char) in sampling.stop_token_ids:
            return self._stops.finish(), "stop", ord(char)
        shown, found = self._stops.push(char, can_stop=can_stop)
        if found is not None:
            return shown, "stop", found
        at_eos = num_out >= len(self._script.text) and can_stop and not sampling.ignore_eos
        if num_out >= self._max_tokens or at_eos:
            reason = "length" if num_out >= self._max_tokens else "stop"
            return shown + self._stops.finish(), reason, None
        return shown, None, None

    def stats(self) -> SequenceStats:
        """The counts so far."""
        stats = self._counters.freeze(
            num_prompt_tokens=self._num_prompt, num_output_tokens=self.num_out, queue_wait_s=0.0
        )
        return replace(stats, policy_changes=tuple(self.changes))

    def _wants_logprobs(self) -> bool:
        return self._request.sampling.num_logprobs is not None

    def _logprob(self, token: int) -> DeltaLogprob:
        num = self._request.sampling.num_logprobs or 0
        ranked = [token, *(t for t in range(97, 97 + num) if t != token)][:num]
        top = tuple((chr(t), t, -0.125 * (rank + 1), chr(t).encode()) for rank, t in enumerate(ranked))
        return DeltaLogprob(chr(token), token, -0.125, chr(token).encode(), top)

    def _prompt_logprobs(self) -> tuple[DeltaLogprob | None, ...]:
        prompt = self._request.prompt or ""
        ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else prompt
        return (None, *(self._logprob(token) for token in ids[1:]))


def _refuse_formats(request: GenerationRequest) -> None:
    """A script fits no format."""
    if (request.response_format or {}).get("type", "text") != "text":
        raise UnsupportedParameter("'response_format' needs a model; here is a script.", "response_format")
    if request.tool_choice.mode != "none":
        raise UnsupportedParameter("'tools' need a model; here is a script.", "tools")
