"""A causal LM as drafter: autoregressive chains from a model cheaper than the target.

The draft model has a paged KV cache of its own. It keeps no record of what was accepted: it
remembers which tokens it computed and compares them with the context at the next `propose`. So
rejected drafts, steps without it, and a policy that changed in between all come to the same: the
tokens it has not computed yet are computed next, at most `catch_up_tokens` a step for all
sequences that are behind, and a sequence still behind gets no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import BatchRow, build_batch
from engine.config import DraftModelConfig
from engine.errors import DrafterMismatch
from engine.kv.block_manager import BlockManager, BlockTable, extend_hashes, new_block_table
from engine.models.interface import LanguageModel
from engine.models.spec import ModelSpec
from engine.sampling import argmax_rows
from engine.spec.confidence import ConfidenceStop
from engine.spec.drafter import DraftContext
from engine.spec.randomness import gumbel_rows
from engine.spec.tree import EMPTY_TREE, DraftTree


@dataclass(slots=True)
class _DraftState:
    """What the draft's cache holds for one sequence.

    The first `num_computed` tokens of the sequence are in the cache, and behind them the draft
    tokens `drafted`, of which the context will tell how many were right.
    """

    block_table: BlockTable[int] = field(default_factory=new_block_table)
    num_computed: int = 0
    drafted: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    num_named: int = 0  # blocks already offered for sharing
    last_used: int = 0  # the `propose` that last asked for this sequence

    def keep_common(self, token_ids: Sequence[int]) -> None:
        """Keep of the cache what agrees with the context, less the last token: it gives the logits.

        Only the drafted tokens need a look, since a context never changes what it once held.
        """
        if self.num_computed >= len(token_ids):
            self.num_computed = len(token_ids) - 1
        for token in self.drafted:
            if self.num_computed >= len(token_ids) - 1 or token_ids[self.num_computed] != token:
                break
            self.num_computed += 1
        self.drafted = []


@dataclass(slots=True)
class DraftJob:
    """One sequence's part of a `propose`: the tokens to compute next, then the draft so far."""

    index: int
    context: DraftContext
    state: _DraftState
    num_draft: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_greedy(self) -> bool:
        return self.context.temperature == 0.0

    @property
    def needs_probs(self) -> bool:
        """False where acceptance never asks how likely the draft was: greedy and keyed rules."""
        return not self.is_greedy and not self.context.generator.is_seeded


class DraftModelDrafter:
    """Drafts chains with a causal LM, all sequences in one batch, one forward a draft token.

    Greedy requests get the model's argmax. The others get samples of softmax(logits/temperature),
    drawn with the sequence's keyed noise, with `probs` where the acceptance rule needs them.
    """

    def __init__(
        self,
        model: LanguageModel,
        target: ModelSpec,
        config: DraftModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        name: str = "draft",
    ) -> None:
        """Raises `DrafterMismatch` when the two vocabularies differ in size."""
        if model.spec.vocab_size != target.vocab_size:
            raise DrafterMismatch(
                f"the draft model {model.spec.name!r} has {model.spec.vocab_size} tokens and the target "
                f"{target.name!r} has {target.vocab_size}; a draft model must share the target's tokenizer"
            )
        self.name = name
        self.num_speculative_tokens = config.num_speculative_tokens
        self.blocks = BlockManager(num_blocks, block_size)
        self._model = model
        self._catch_up_tokens = config.catch_up_tokens
        self._cache = model.new_cache(num_blocks, block_size)
        self._states: dict[str, _DraftState] = {}
        self._num_proposals = 0
        self._work = (0, 0)
        self._num_fill_tokens = 0
        self._stop = ConfidenceStop(config.min_confidence)

    @property
    def num_sequences(self) -> int:
        """Sequences for which something is held."""
        return len(self._states)

    @property
    def num_weight_bytes(self) -> int:
        """Weight memory this drafter adds to the target's, in bytes."""
        return self._model.num_bytes

    @property
    def num_cache_bytes(self) -> int:
        """KV memory held, in bytes."""
        return self._cache.num_bytes

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when blocks and tables disagree."""
        self.blocks.check_integrity(state.block_table for state in self._states.values())

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Start afresh; the prompt is computed with the first drafts, and never if none comes."""
        self.end(seq_id)

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """The next context says what was committed."""
        self._stop.observe(seq_id, num_accepted)

    def end(self, seq_id: str) -> None:
        """Give back the sequence's blocks."""
        self._stop.end(seq_id)
        state = self._states.pop(seq_id, None)
        if state is not None:
            self.blocks.release(state.block_table)

    def work(self) -> tuple[int, ...]:
        """Sequential forwards of the last `propose`, KV tokens they attended to, and context tokens
        computed for sequences that were behind by more than a draft."""
        return (*self._work, self._num_fill_tokens)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context; empty while the draft is behind, out of context or of blocks."""
        self._work = (0, 0)
        self._num_fill_tokens = 0
        self._num_proposals += 1
        trees = [EMPTY_TREE] * len(contexts)
        jobs = [job for job in map(self._job, range(len(contexts)), contexts) if job is not None]
        live, logits = self._catch_up([job for job in jobs if self._reserve(job)])
        drafting, is_first = live, True
        while live:
            sure = self._stop.going_on([job.context.seq_id for job in live], logits, is_first=is_first)
            if len(sure) < len(live):
                live, logits = [live[place] for place in sure], logits[sure]
                if not live:
                    break
            is_first = False
            self._draw(live, logits)
            live = [job for job in live if len(job.token_ids) < job.num_draft]
            if live:
                logits = self._forward([self._next_row(job) for job in live])
        for job in drafting:
            probs = torch.stack(job.probs) if job.probs else None
            trees[job.index] = DraftTree.chain(tuple(job.token_ids), probs)
        return trees

    def _job(self, index: int, context: DraftContext) -> DraftJob | None:
        """What is to do for a context; None where no draft can be made."""
        num_tokens = len(context.token_ids)
        # The last draft token itself is not computed, hence the + 1.
        num_draft = min(context.max_draft_tokens, self._model.spec.max_model_len - num_tokens + 1)
        if num_draft <= 0 or num_tokens == 0:
            return None
        state = self._states.setdefault(context.seq_id, _DraftState())
        state.last_used = self._num_proposals
        state.keep_common(context.token_ids)
        return DraftJob(index, context, state, num_draft)

    def _reserve(self, job: DraftJob) -> bool:
        """Blocks for the whole context and draft, or none at all.

        A sequence that cannot be drafted for holds no blocks, so that the others can. Sequences
        this method was not asked about give theirs back first, the longest unused ones before.
        """
        num_tokens = len(job.context.token_ids) + job.num_draft - 1
        while not self._acquire(job, num_tokens):
            idle = [s for s in self._states.values() if s.block_table and s.last_used < self._num_proposals]
            if not idle:
                self._clear(job.state)
                return False
            self._clear(min(idle, key=lambda state: state.last_used))
        return True

    def _acquire(self, job: DraftJob, num_tokens: int) -> bool:
        state, salt = job.state, job.context.cache_salt
        if state.block_table:
            return self.blocks.extend(state.block_table, num_tokens)
        prefix: list[int] = []
        if salt is not None:
            block_size = self.blocks.block_size
            extend_hashes(state.block_names, job.context.token_ids, block_size, salt)
            # One token at least is left to compute: only a forward gives logits.
            usable = (len(job.context.token_ids) - 1) // block_size
            prefix = self.blocks.find_prefix(state.block_names[:usable])
        if not self.blocks.acquire(state.block_table, prefix, num_tokens):
            return False
        state.num_computed = len(prefix) * self.blocks.block_size
        state.num_named = len(prefix)
        return True

    def _clear(self, state: _DraftState) -> None:
        self.blocks.release(state.block_table)
        state.num_computed = state.num_named = 0
        state.drafted = []

    def _catch_up(self, jobs: Sequence[DraftJob]) -> tuple[list[DraftJob], torch.Tensor]:
        """Compute what the contexts are ahead; the jobs that are level now, with their logits rows.

        Those that lack no more than a draft and its bonus token keep the pace and are always
        computed; the others share `catch_up_tokens`.
        """
        budget = self._catch_up_tokens
        rows: list[BatchRow] = []
        level: list[DraftJob] = []
        for job in jobs:
            state, tokens = job.state, job.context.token_ids
            num_new = len(tokens) - state.num_computed
            if num_new > self.num_speculative_tokens + 1:
                num_new = min(num_new, budget)
                budget -= num_new
                self._num_fill_tokens += num_new
            if num_new == 0:
                continue
            end = state.num_computed + num_new
            is_level = end == len(tokens)
            rows.append(
                BatchRow(
                    tokens[state.num_computed : end], state.num_computed, state.block_table, int(is_level)
                )
            )
            if is_level:
                level.append(job)
            state.num_computed = end
        logits = self._forward(rows)
        for job in jobs:
            self._name_blocks(job)
        return level, logits

    def _name_blocks(self, job: DraftJob) -> None:
        """Offer blocks full of context tokens to sequences with the same beginning and salt."""
        state, context = job.state, job.context
        num_full = state.num_computed // self.blocks.block_size
        if context.cache_salt is None or num_full == state.num_named:
            return
        extend_hashes(state.block_names, context.token_ids, self.blocks.block_size, context.cache_salt)
        for block in range(state.num_named, num_full):
            self.blocks.commit(state.block_table[block], state.block_names[block])
        state.num_named = num_full

    def _draw(self, jobs: Sequence[DraftJob], logits: torch.Tensor) -> None:
        """Add the next draft token of every job, `logits` [num_jobs, vocab] being in their order."""
        draw(jobs, logits)

    def _next_row(self, job: DraftJob) -> BatchRow:
        """The last drafted token, to be computed for the one after it."""
        token, state = job.token_ids[-1], job.state
        start = state.num_computed + len(state.drafted)
        state.drafted.append(token)
        return BatchRow([token], start, state.block_table, 1)

    def _forward(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """One forward of the draft model; logits of the wanted rows, [num_rows, vocab] float32."""
        if not rows:
            return torch.empty((0, self._model.spec.vocab_size), device=self._model.device)
        batch = build_batch(rows, self.blocks.block_size, self._model.device)
        hidden = self._model.forward(batch, self._cache)
        num_forwards, num_kv_tokens = self._work
        self._work = num_forwards + 1, num_kv_tokens + sum(row.start + len(row.token_ids) for row in rows)
        return self._model.logits(hidden[batch.logits_rows])


def draw(jobs: Sequence[DraftJob], logits: torch.Tensor) -> None:
    """Add the next draft token of every job, `logits` [num_jobs, vocab] being in their order."""
    greedy = [i for i, job in enumerate(jobs) if job.is_greedy]
    sampled = [i for i, job in enumerate(jobs) if not job.is_greedy]
    if greedy:
        rows = logits if not sampled else logits[torch.tensor(greedy, device=logits.device)]
        for i, token in zip(greedy, argmax_rows(rows), strict=True):
            jobs[i].token_ids.append(token)
    if not sampled:
        return
    picked = [jobs[i] for i in sampled]
    scores = logits[torch.tensor(sampled, device=logits.device)]
    temperatures = torch.tensor([job.context.temperature for job in picked], device=scores.device)
    scores = (scores - scores.amax(dim=1, keepdim=True)) / temperatures[:, None]
    for job, row in zip(picked, scores, strict=True):
        if job.needs_probs:
            job.probs.append(row.softmax(0))
    keys = [job.context.generator.for_draft(len(job.context.token_ids)) for job in picked]
    positions = [len(job.context.token_ids) + len(job.token_ids) for job in picked]
    noise = gumbel_rows(keys, positions, scores.shape[1], scores.device)
    for job, token in zip(picked, argmax_rows(scores + noise), strict=True):
        job.token_ids.append(token)
