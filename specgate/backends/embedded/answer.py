"""One answer being assembled: step outputs in, deltas of text out.

Text, token ids, logprobs and counts are cut at the same token. The earliest event in token order
wins: a stop string that is complete at token t ends the answer there, whatever the engine put
behind it in the same step or in the steps before the abort reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.stats import SequenceCounters
from engine.types import BASELINE, FinishReason, SamplingParams, SequenceOutput, SequenceStats, TokenLogprob
from specgate.backends.embedded.detokenize import TokenBytes, new_detokenizer
from specgate.backends.embedded.origins import Origins
from specgate.backends.embedded.stop import StopFinder
from specgate.backends.embedded.tool_reader import ToolReader
from specgate.types import Delta, DeltaLogprob, ToolCallDelta


class Answer:
    """The state of one answer. Feed it with `push`, empty it with `take`.

    `needs_abort` turns True when a stop string ended the answer while the engine goes on: the
    caller aborts the request and feeds what still comes, since the engine's last word carries
    the statistics; if no last word comes, `close` ends the answer from what was seen here.
    """

    def __init__(
        self,
        table: TokenBytes,
        sampling: SamplingParams,
        stops: Sequence[str],
        num_prompt_tokens: int,
        tools: ToolReader | None = None,
        *,
        has_trace: bool = False,
    ) -> None:
        """`tools`: finds tool calls in the text; None: it is all content. `has_trace`: pieces of content
        say which drafter they came from."""
        self._table = table
        self._origins = Origins() if has_trace and tools is None else None
        self._tools = tools
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._text = new_detokenizer(table)
        self._stops = StopFinder(stops)
        self._counters = SequenceCounters()  # of what is delivered, kept as the engine keeps its own
        self._num_tokens = 0
        self._found: str | None = None
        self._pending = _Pending()
        self._finish: str | None = None
        self._stop_reason: str | int | None = None
        self._stats: SequenceStats | None = None
        self._queue_wait_s: float | None = None

    @property
    def needs_abort(self) -> bool:
        """True from the moment a stop string was found until the engine's last word."""
        return self._found is not None and self._finish is None

    @property
    def is_finished(self) -> bool:
        """True when the last delta is ready or taken."""
        return self._finish is not None

    def push(self, output: SequenceOutput) -> None:
        """One step's output for this answer. The finish reason is not ABORT or ERROR, unless a
        stop string was found before."""
        if output.queue_wait_s is not None:
            self._queue_wait_s = output.queue_wait_s
        if self._found is None:
            self._read(output)
        if self._found is not None:
            if output.finish_reason is not None:
                self._end_at_stop(output.stats or SequenceStats(num_prompt_tokens=self._num_prompt_tokens))
        elif output.finish_reason is not None:
            self._show(self._stops.finish())
            self._finish = output.finish_reason.value
            if self._finish == "stop" and self._tools is not None and self._tools.num_whole:
                self._finish = "tool_calls"
            self._stats = output.stats
            if output.finish_reason is FinishReason.STOP and output.token_ids:
                last = output.token_ids[-1]
                self._stop_reason = last if last in self._sampling.stop_token_ids else None

    def close(self) -> None:
        """No last word will come for an answer that a stop string ended."""
        if self.needs_abort:
            self._end_at_stop(SequenceStats(num_prompt_tokens=self._num_prompt_tokens))

    def take(self) -> Delta | None:
        """What can be shown now, or None. Tokens without text yet wait for their text."""
        if self._finish is not None and self._tools is not None:
            self._pending.text += self._tools.finish()
        if not self._pending.text and not self._pending.tool_calls and self._finish is None:
            return None
        pending, self._pending = self._pending, _Pending()
        return Delta(
            text=pending.text,
            num_tokens=len(pending.token_ids),
            num_accepted=pending.num_accepted,
            token_ids=tuple(pending.token_ids),
            logprobs=tuple(pending.logprobs),
            prompt_logprobs=pending.prompt_logprobs,
            tool_calls=tuple(pending.tool_calls),
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            stats=self._stats,
            queue_wait_s=self._queue_wait_s,
            pieces=self._origins.take(pending.text) if self._origins is not None else (),
        )

    def _read(self, output: SequenceOutput) -> None:
        """Append the output's tokens up to its end or to the token at which a stop string is complete."""
        pending = self._pending
        if output.prompt_logprobs:
            pending.prompt_logprobs = tuple(
                None if entry is None else self._in_text(entry) for entry in output.prompt_logprobs
            )
        num_kept = 0
        for place, token_id in enumerate(output.token_ids):
            num_kept = place + 1
            is_last = output.finish_reason is not None and num_kept == len(output.token_ids)
            is_stop_token = is_last and output.finish_reason is FinishReason.STOP
            begins_calls = self._tools is not None and token_id == self._tools.trigger_token
            piece = "" if is_stop_token or begins_calls else self._text.push(token_id)
            if is_last:
                piece += self._text.finish()
            if self._origins is not None:
                is_accepted = place < output.num_accepted_tokens
                self._origins.add(piece, output.draft_method if is_accepted else None)
            if self._add_text(piece, self._num_tokens + num_kept):
                break
            if begins_calls and not is_stop_token:
                self._begin_calls()
        if output.finish_reason is not None and not output.token_ids:
            self._add_text(self._text.finish(), self._num_tokens)
        num_accepted = min(output.num_accepted_tokens, num_kept)
        self._num_tokens += num_kept
        pending.token_ids += output.token_ids[:num_kept]
        pending.logprobs += [self._in_text(entry) for entry in output.logprobs[:num_kept]]
        pending.num_accepted += num_accepted
        if num_kept:
            self._counters.num_target_steps += 1
        if output.draft_method is not None:
            self._counters.grant(output.draft_method)
        if output.num_draft_tokens:
            self._counters.add_draft(
                output.num_draft_tokens,
                num_accepted,
                num_kept,
                output.draft_method or BASELINE,
                output.num_granted_tokens,
            )

    def _add_text(self, piece: str, num_tokens: int) -> bool:
        """True when a stop string is complete, which min_tokens may forbid as it does for stop tokens."""
        shown, self._found = self._stops.push(piece, can_stop=num_tokens > self._sampling.min_tokens)
        self._show(shown)
        return self._found is not None

    def _show(self, text: str) -> None:
        """Add text to what waits, as content or as calls."""
        if self._tools is None:
            self._pending.text += text
        elif text:
            content, calls = self._tools.push(text)
            self._pending.text += content
            self._pending.tool_calls += calls

    def _begin_calls(self) -> None:
        """A special token ends the text before it, so that nothing of that can still become a stop string."""
        assert self._tools is not None
        self._show(self._stops.finish() + self._text.finish())
        self._tools.begin()

    def _in_text(self, entry: TokenLogprob) -> DeltaLogprob:
        table = self._table
        return DeltaLogprob(
            token=table.text_of(entry.token_id),
            token_id=entry.token_id,
            logprob=entry.logprob,
            token_bytes=table.of(entry.token_id),
            top=tuple((table.text_of(token), token, value, table.of(token)) for token, value in entry.top),
        )

    def _end_at_stop(self, engine: SequenceStats) -> None:
        """Finish with counts of what was delivered: the engine may have gone on for a step or two."""
        self._finish = "stop"
        self._stop_reason = self._found
        delivered = self._counters.freeze(
            num_prompt_tokens=engine.num_prompt_tokens,
            num_output_tokens=self._num_tokens,
            queue_wait_s=engine.queue_wait_s,
        )
        self._stats = replace(
            delivered,
            num_cached_tokens=engine.num_cached_tokens,
            num_preemptions=engine.num_preemptions,
            in_hindsight=engine.in_hindsight,
            draft_s=engine.draft_s,
            device=engine.device,
            policy_changes=tuple(c for c in engine.policy_changes if c.token_index < self._num_tokens),
        )


class _Pending:
    """What waits to be taken."""

    __slots__ = ("logprobs", "num_accepted", "prompt_logprobs", "text", "token_ids", "tool_calls")

    def __init__(self) -> None:
        self.text = ""
        self.num_accepted = 0
        self.token_ids: list[int] = []
        self.logprobs: list[DeltaLogprob] = []
        self.prompt_logprobs: tuple[DeltaLogprob | None, ...] = ()
        self.tool_calls: list[ToolCallDelta] = []
