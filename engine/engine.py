"""The engine: requests in, tokens out, one `step` at a time.

    plan -> schedule -> draft -> forward -> verify -> commit -> emit

Single-threaded and synchronous. What it must not know for itself is injected: the target, the
drafters, the planner, the clock and the source of seeds. `engine.factory` builds one from an
`EngineConfig`, `engine.service` runs one behind an inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from engine.admission import check_request
from engine.charging import charge_step
from engine.config import EngineConfig
from engine.drafting import Drafting
from engine.errors import IntegrityError, InvalidLogits, RequestRefused
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState
from engine.hidden_tail import HiddenTail, keep_hidden, tail_bytes
from engine.hindsight import Hindsight
from engine.kv.block_manager import BlockManager
from engine.models.interface import LanguageModel
from engine.planning import Planning, sequence_view
from engine.runner import ModelRunner
from engine.sampling import SamplingState
from engine.scheduler import ScheduledStep, Scheduler
from engine.sequence import Sequence
from engine.spec.drafter import Drafter, HoldsMemory
from engine.spec.planner import SpecPlan, SpecPlanner, StepView
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree
from engine.spec.verify import VerifyResult, verify
from engine.stats import StepTimer, record_step
from engine.types import (
    BASELINE,
    AcceptRule,
    EngineLoad,
    EngineRequest,
    FinishReason,
    SequenceOutput,
    StepRecord,
    StepResult,
    TokenLogprob,
)

_LOOK_BACK_EVERY = 8  # steps, while the planner could do nothing with what is learnt


class Engine:
    """Continuous batching with speculation over one target model.

    Requests are added and aborted between steps. Every request ends with exactly one output that
    has a finish reason, delivered by `step` (or by `fail_step`).
    """

    def __init__(
        self,
        config: EngineConfig,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        planner: SpecPlanner,
        clock: Callable[[], float],
        seeds: Callable[[], int],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`clock` gives seconds; `seeds` gives a fresh seed for each sampled request without one;
        without `grammars` requests that have one are refused."""
        self.config = config
        self.grammars = grammars
        self._clock = clock
        self._seeds = seeds
        self._blocks = BlockManager(
            config.num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache
        )
        self._scheduler = Scheduler(
            self._blocks, max_batch_tokens=config.max_batch_tokens, max_sequences=config.max_sequences
        )
        self._runner = ModelRunner(target, config.num_blocks, config.block_size, config.max_sequences)
        self._drafting = Drafting(drafters, target.spec.vocab_size, clock, config.draft_timeout_s)
        self._hindsight = Hindsight(self._drafting)
        self._planning = Planning(planner, self._drafting.drafters.keys())
        self._vocab_size = target.spec.vocab_size
        self._eos_token_ids = frozenset(target.spec.eos_token_ids)
        limits = [target.spec.max_model_len, self._scheduler.capacity]
        if config.max_model_len is not None:
            limits.append(config.max_model_len)
        self.max_model_len = min(limits)
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[SequenceOutput] = []  # said, but not yet returned by a step
        self._in_step: list[Sequence] = []
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def methods(self) -> Mapping[str, int]:
        """The loaded drafters' names with their default number of draft tokens."""
        return {name: drafter.num_speculative_tokens for name, drafter in self._drafting.drafters.items()}

    @property
    def precision(self) -> str:
        """The target's number format, e.g. float32 or int8."""
        return self._runner.precision

    @property
    def planner(self) -> SpecPlanner:
        """Who grants draft tokens; may be replaced between steps."""
        return self._planning.planner

    @planner.setter
    def planner(self, planner: SpecPlanner) -> None:
        self._planning.use(planner)

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to this, exclusive."""
        return self._vocab_size

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do or to say."""
        return bool(self._sequences or self._outputs)

    @property
    def num_prefilling(self) -> int:
        """Running sequences whose prompt is not wholly computed."""
        return sum(not seq.is_decoding for seq in self._scheduler.running)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that have not ended yet."""
        return tuple(self._sequences)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestRefused when it could never run here."""
        # A request for a drafter that was unloaded meanwhile runs plainly.
        check_request(request, self._vocab_size, self.max_model_len, self._planning.known)
        if request.request_id in self._sequences:
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        grammar = self._start_grammar(request)
        params = request.sampling
        seq = Sequence(
            request,
            arrival=self._num_arrivals,
            arrived_s=self._clock(),
            eos_token_ids=self._eos_token_ids,
            context_limit=self.max_model_len,
        )
        if params.seed is not None:
            key = RandomKey(params.seed, is_seeded=True)
        else:
            # Where all requests are keyed, drafters draw with the target's noise, as if seeded.
            is_keyed = self.config.accept_rule is AcceptRule.KEYED
            key = RandomKey(0 if params.is_greedy else self._seeds(), is_seeded=is_keyed)
        seq.sampling = SamplingState(
            params=params,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=seq.output_token_ids,
            eos_token_ids=self._eos_token_ids,
            key=key,
            rule=self.config.accept_rule,
            grammar=grammar,
        )
        if self._drafting.num_hidden_rows:
            seq.hidden = HiddenTail(self._drafting.num_hidden_rows)
        self._num_arrivals += 1
        self._sequences[seq.seq_id] = seq
        self._scheduler.add(seq)

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it stands; its last output comes with the next step.

        False when there is no such request (any more): an abort may cross a finish on its way.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._outputs.append(self._finish(seq, FinishReason.ABORT))
        return True

    def set_drafters(self, drafters: Mapping[str, Drafter]) -> None:
        """Have exactly these drafters from the next step on; for `methods` that go, memory goes with them.

        Running requests of theirs go on plainly. A drafter that reads hidden states drafts for requests
        that come after it.
        """
        self._drafting.replace(drafters, self._sequences.values())
        self._planning.known.update(drafters)
        if not self._drafting.num_hidden_rows:
            for seq in self._sequences.values():
                seq.hidden = None

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """The loaded drafters by method."""
        return dict(self._drafting.drafters)

    @property
    def target(self) -> LanguageModel:
        """The model whose distribution is served."""
        return self._runner.target

    def step(self) -> StepResult:
        """Advance every sequence that has its turn. Returns what there is to say.

        An exception leaves the engine usable after `fail_step`.
        """
        timer = StepTimer(self._clock)
        plans, num_planner_errors = self._plan(timer.started_s)
        step = self._scheduler.schedule({seq_id: plan.max_draft_tokens for seq_id, plan in plans.items()})
        self._begin(step)
        timer.lap("schedule")
        if not step.sequences:
            return self._emit(None)
        trees = self._drafting.propose(step, plans)
        timer.lap("draft")
        starts = [seq.num_computed for seq in step.sequences]
        logits, sizes = self._runner.forward(step, trees)
        timer.lap("forward")
        result = self._verify(step, trees, logits)
        outputs = self._commit(step, plans, trees, result)
        self._keep_hidden(step, trees, starts)
        on_device_s = self._runner.wait_for_forward()
        timer.lap("verify")
        timer.move("verify", "forward", on_device_s)
        record = record_step(self._num_steps, step, trees, sizes, outputs, timer)
        work, errors = self._drafting.take_report()
        record = replace(
            record,
            drafts=work,
            drafter_errors=errors,
            num_planner_errors=num_planner_errors,
            kernels=self._runner.kernels,
        )
        self._outputs = charge_step(step, plans, trees, record, self._outputs)
        is_asleep = self._planning.sleeps(self._num_steps, step.num_decodes)
        if not is_asleep or self._num_steps % _LOOK_BACK_EVERY == 0:
            self._hindsight.look([seq for seq in step.sequences if seq.seq_id in self._sequences])
        return self._emit(record)

    def fail_step(self, message: str) -> StepResult:
        """After `step` raised: end the requests it was working on with FinishReason.ERROR.

        All requests, if it failed before choosing any, so that the same fault cannot come back
        for ever.
        """
        affected = [seq for seq in self._in_step if seq.seq_id in self._sequences]
        for seq in affected or list(self._sequences.values()):
            self._outputs.append(self._finish(seq, FinishReason.ERROR, message))
        self._drafting.drop_work()
        return self._emit(None)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_blocks=self._blocks.num_free,
            num_cached_blocks=self._blocks.num_cached,
            num_used_blocks=self._blocks.num_used,
            num_total_blocks=self._blocks.num_blocks,
            num_held=min(self._scheduler.num_held, len(self._scheduler.waiting)),
        )

    def memory_bytes(self) -> dict[str, int]:
        """What weights and KV caches take, by part: those of the target and those of all drafters.

        `draft_kv` has in it what a full batch's hidden states take that are kept for the drafters.
        """
        target = self._runner.target
        num_hidden_rows = self._drafting.num_hidden_rows
        kept = self.config.max_sequences * tail_bytes(num_hidden_rows, target.spec.hidden_size, target.dtype)
        drafters = [d for d in self._drafting.drafters.values() if isinstance(d, HoldsMemory)]
        return {
            "target_weights": target.num_bytes,
            "target_kv": self._runner.cache.num_bytes,
            "draft_weights": sum(drafter.num_weight_bytes for drafter in drafters),
            "draft_kv": sum(drafter.num_cache_bytes for drafter in drafters) + kept,
        }

    def check_integrity(self) -> None:
        """Raises IntegrityError when block accounts and sequences disagree. Callable between steps."""
        self._scheduler.check_integrity()
        if len(self._sequences) != len(self._scheduler.running) + len(self._scheduler.waiting):
            raise IntegrityError("a sequence is known to the engine and not to its scheduler, or twice")

    def check_idle(self) -> None:
        """Raises IntegrityError unless nothing runs and every block is free again."""
        self.check_integrity()
        load = self.load()
        if self.has_work or load.num_used_blocks or load.num_running or load.num_waiting:
            raise IntegrityError(f"not idle: {load}, requests {sorted(self._sequences)}")

    def _start_grammar(self, request: EngineRequest) -> GrammarState | None:
        """Compiled here unless it was before: `engine.service` sees to that."""
        if request.grammar is None:
            return None
        if self.grammars is None:
            raise RequestRefused("this engine has no tokenizer, so that no format can be kept", "grammar")
        return self.grammars.start(request.grammar)

    def _plan(self, now_s: float) -> tuple[dict[str, SpecPlan], int]:
        """The planner's grants for drafters that exist, and how many faults it made."""
        decoding = [seq for seq in self._scheduler.running if seq.is_decoding]
        known = self._planning.foreknown(self._num_steps, decoding, len(self._scheduler.running))
        if known is not None:
            return known, 0
        view = StepView(
            step=self._num_steps,
            now_s=now_s,
            sequences=tuple(map(sequence_view, decoding)),
            num_prefill_tokens=sum(s.num_uncomputed for s in self._scheduler.running if not s.is_decoding),
            num_waiting=len(self._scheduler.waiting),
            num_free_blocks=self._blocks.num_free,
        )
        return self._planning.plan(view, decoding)

    def _begin(self, step: ScheduledStep) -> None:
        """Note what was scheduled, before any of it can fail."""
        self._in_step = step.sequences
        for seq in step.preempted:
            self._drafting.end(seq)
        for seq in step.sequences[step.num_decodes :]:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = self._clock()

    def _verify(self, step: ScheduledStep, trees: list[DraftTree], logits: torch.Tensor) -> VerifyResult:
        """Verify all deciding sequences; one that allows no choice is ended alone, not the batch."""
        while True:
            states = [state for i in step.deciding if (state := step.sequences[i].sampling) is not None]
            try:
                return verify([trees[i] for i in step.deciding], logits, states)
            except InvalidLogits as error:
                culprit = error.sequence_index
                if culprit is None:
                    raise
                sizes = [1 + len(trees[i]) for i in step.deciding]
                first = sum(sizes[:culprit])
                logits = torch.cat([logits[:first], logits[first + sizes[culprit] :]])
                seq = step.sequences[step.deciding.pop(culprit)]
                self._outputs.append(self._finish(seq, FinishReason.ERROR, str(error)))

    def _commit(
        self, step: ScheduledStep, plans: Mapping[str, SpecPlan], trees: list[DraftTree], result: VerifyResult
    ) -> list[SequenceOutput]:
        """Make the verified tokens part of their sequences; what each has to say."""
        for index in range(step.num_decodes, len(step.sequences)):
            seq = step.sequences[index]
            num_computed = seq.num_computed + step.num_new[index]
            if num_computed < len(seq.token_ids):
                self._scheduler.commit(seq, num_computed)
        outputs = []
        for row, index in enumerate(step.deciding):
            seq = step.sequences[index]
            granted = plans[seq.seq_id].method if step.max_draft[index] > 0 else BASELINE
            decided = Decided(
                granted=granted,
                method=granted if trees[index].token_ids else BASELINE,
                num_granted=step.max_draft[index],
                num_drafted=len(trees[index]),
                token_ids=result.token_ids[row],
                num_accepted=len(result.accepted_nodes[row]),
                logprobs=result.logprobs[row],
            )
            output = self._advance(seq, decided)
            outputs.append(output)
            self._outputs.append(output)  # at once, so that a fault further on cannot lose it
        return outputs

    def _keep_hidden(self, step: ScheduledStep, trees: list[DraftTree], starts: list[int]) -> None:
        """Hidden states of the tokens that were computed and stay, for drafters that read them."""
        if not self._drafting.num_hidden_rows or self._runner.hidden is None:
            return
        spans = [
            (start, num_new + len(tree), seq.num_computed - start)
            for seq, num_new, tree, start in zip(step.sequences, step.num_new, trees, starts, strict=True)
        ]
        keep_hidden([seq.hidden for seq in step.sequences], spans, self._runner.hidden)

    def _advance(self, seq: Sequence, decided: Decided) -> SequenceOutput:
        """Append what was decided, cut at the first stop or limit, and finish if there is one."""
        num_kept, reason = seq.cut(decided.token_ids)
        token_ids = decided.token_ids[:num_kept]
        num_accepted = min(decided.num_accepted, num_kept)
        num_before = len(seq.token_ids)
        is_first = not seq.output_token_ids
        seq.append(token_ids)
        self._scheduler.commit(seq, min(num_before + decided.num_accepted, len(seq.token_ids)))
        seq.last_drafted = (decided.method, decided.num_drafted, num_accepted)
        seq.counters.num_target_steps += num_kept > 0
        if decided.granted != BASELINE:
            seq.counters.grant(decided.granted)
        if decided.num_drafted:
            seq.counters.add_draft(
                decided.num_drafted, num_accepted, num_kept, decided.method, decided.num_granted
            )
        if seq.drafters:
            self._drafting.observe(seq, decided.method, token_ids, num_accepted)
        output = SequenceOutput(
            request_id=seq.seq_id,
            token_ids=token_ids,
            logprobs=decided.logprobs[:num_kept],
            prompt_logprobs=tuple(seq.prompt_logprobs or ()) if is_first else (),
            queue_wait_s=seq.queue_wait_s(self._clock()) if is_first else None,
            num_accepted_tokens=num_accepted,
            num_draft_tokens=decided.num_drafted,
            num_granted_tokens=decided.num_granted,
            draft_method=None if decided.granted == BASELINE else decided.granted,
        )
        if reason is None:
            return output
        end = self._finish(seq, reason)
        return replace(output, finish_reason=reason, stats=end.stats)

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """Take `seq` out of everything; its last word."""
        del self._sequences[seq.seq_id]
        self._scheduler.remove(seq)
        self._drafting.end(seq)
        self._planning.forget()
        stats = seq.counters.freeze(
            num_prompt_tokens=seq.prompt_length,
            num_output_tokens=len(seq.output_token_ids),
            queue_wait_s=seq.queue_wait_s(self._clock()),
        )
        return SequenceOutput(seq.seq_id, finish_reason=reason, stats=stats, error=error)

    def _emit(self, record: StepRecord | None) -> StepResult:
        outputs = tuple(self._outputs)
        self._outputs.clear()
        self._in_step = []
        self._num_steps += record is not None
        return StepResult(outputs, record, self.load())


@dataclass(frozen=True, slots=True)
class Decided:
    """What one step's verify decided for one sequence."""

    granted: str  # who might have drafted; baseline for nobody
    method: str  # who did
    num_granted: int  # draft tokens at most
    num_drafted: int
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...]
