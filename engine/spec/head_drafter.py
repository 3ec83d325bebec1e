"""Chains from a draft head, which reads the target's hidden states and so needs little of its own.

Entry j of the head's cache is made of the target's hidden state of token j and of tokens j and j + 1; it
guesses the hidden state of token j + 1 and with it token j + 2. Entries from true states are kept,
those made while drafting are overwritten at the next `propose`.

The head attends to a window that begins wherever hidden states are there: after a prefix found in
the cache, after steps under another policy, after a preemption. It was trained on such windows.
A window that has grown to twice `context_tokens` begins anew with the newest half; so memory and
time are bounded, and the head knows no context limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import BatchRow, build_batch
from engine.config import DraftModelConfig
from engine.kernels.native_draft import ChainJob
from engine.kv.block_manager import BlockManager, BlockTable, new_block_table
from engine.models.draft_head import DraftHead
from engine.models.interface import GreedyChains
from engine.sampling import argmax_rows
from engine.spec.confidence import ConfidenceStop
from engine.spec.drafter import DraftContext
from engine.spec.randomness import gumbel_rows
from engine.spec.tree import EMPTY_TREE, DraftTree


@dataclass(slots=True)
class _Window:
    """The entries of one sequence that are in the cache: positions `first` to `end` - 1."""

    block_table: BlockTable[int] = field(default_factory=new_block_table)
    first: int = 0
    end: int = 0
    last_used: int = 0  # the `propose` that last asked for this sequence


@dataclass(slots=True)
class _Job:
    """One sequence's part of a `propose`."""

    index: int
    context: DraftContext
    window: _Window
    num_draft: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_entries(self) -> int:
        """Entries there can be from true hidden states: one for each token but the newest."""
        return len(self.context.token_ids) - 1

    @property
    def is_greedy(self) -> bool:
        return self.context.temperature == 0.0

    @property
    def needs_probs(self) -> bool:
        """False where acceptance never asks how likely the draft was: greedy and keyed rules."""
        return not self.is_greedy and not self.context.generator.is_seeded


class DraftHeadDrafter:
    """Drafts chains with a draft head, all sequences in one batch, one small forward a draft token.

    Only tokens of the draft vocabulary are drafted; `probs` say so, hence sampled answers keep the
    target's distribution over all tokens.
    """

    def __init__(
        self,
        head: DraftHead,
        config: DraftModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        name: str = "draft",
    ) -> None:
        self.name = name
        self.num_speculative_tokens = config.num_speculative_tokens
        self.blocks = BlockManager(num_blocks, block_size)
        self._head = head
        self._vocab_size = head.spec.vocab_size
        self._catch_up_tokens = max(config.catch_up_tokens, head.context_tokens)
        self._cache = head.new_cache(num_blocks, block_size)
        self._windows: dict[str, _Window] = {}
        self._num_proposals = 0
        self._work = (0, 0, 0)
        self._stop = ConfidenceStop(config.min_confidence)

    @property
    def num_hidden_rows(self) -> int:
        """Hidden states the engine must keep for each sequence."""
        return self._head.context_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences for which something is held."""
        return len(self._windows)

    @property
    def num_weight_bytes(self) -> int:
        """Weight memory this drafter adds to the target's, in bytes."""
        return self._head.num_bytes

    @property
    def num_cache_bytes(self) -> int:
        """KV memory held, in bytes."""
        return self._cache.num_bytes

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when blocks and tables disagree."""
        self.blocks.check_integrity(window.block_table for window in self._windows.values())

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Start afresh."""
        self.end(seq_id)

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """The next context has the hidden states of what was committed."""
        self._stop.observe(seq_id, num_accepted)

    def end(self, seq_id: str) -> None:
        """Give back the sequence's blocks."""
        self._stop.end(seq_id)
        window = self._windows.pop(seq_id, None)
        if window is not None:
            self.blocks.release(window.block_table)

    def work(self) -> tuple[int, ...]:
        """Sequential forwards of the last `propose`, KV tokens they attended to, and entries computed
        for sequences that were behind by more than a draft."""
        return self._work

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context; empty where there is no hidden state, or the window is still behind."""
        self._work = (0, 0, 0)
        self._num_proposals += 1
        trees = [EMPTY_TREE] * len(contexts)
        jobs = [job for job in map(self._job, range(len(contexts)), contexts) if job is not None]
        jobs = [job for job in jobs if self._reserve(job)]
        if self._head.greedy_chains is not None and all(job.is_greedy for job in jobs):
            return self._propose_chains(self._head.greedy_chains, jobs, trees)
        drafting, hidden = self._catch_up(jobs)
        live, is_first = drafting, True
        while live:
            logits = self._head.logits(hidden)
            sure = self._stop.going_on([job.context.seq_id for job in live], logits, is_first=is_first)
            if len(sure) < len(live):
                live, hidden, logits = [live[place] for place in sure], hidden[sure], logits[sure]
                if not live:
                    break
            is_first = False
            self._draw(live, logits)
            going_on = [place for place, job in enumerate(live) if len(job.token_ids) < job.num_draft]
            if len(going_on) < len(live):
                live, hidden = [live[place] for place in going_on], hidden[going_on]
            if live:
                rows = [self._next_row(job) for job in live]
                before = [(job.context.token_ids[-1], *job.token_ids)[-2] for job in live]
                hidden = self._forward(rows, before, hidden)
        for job in drafting:
            probs = torch.stack(job.probs) if job.probs else None
            trees[job.index] = DraftTree.chain(tuple(job.token_ids), probs)
        return trees

    def _job(self, index: int, context: DraftContext) -> _Job | None:
        """What is to do for a context; None where no draft can be made."""
        tail, num_entries = context.hidden, len(context.token_ids) - 1
        if context.max_draft_tokens <= 0 or tail is None or num_entries < 1:
            return None
        if tail.end != num_entries or tail.first >= num_entries:
            return None  # not computed, or not kept
        window = self._windows.setdefault(context.seq_id, _Window())
        window.last_used = self._num_proposals
        # The newest entry is computed again where nothing was added: only a forward gives logits.
        window.end = min(window.end, num_entries - 1)
        limit = 2 * self._head.context_tokens
        is_broken = not window.block_table or window.end < max(tail.first, window.first)
        if is_broken or num_entries - window.first > limit:
            window.first = window.end = max(tail.first, num_entries - self._head.context_tokens)
        return _Job(index, context, window, context.max_draft_tokens)

    def _reserve(self, job: _Job) -> bool:
        """Blocks for the window and the draft, or none; sequences not asked about give theirs back."""
        window = job.window
        num_tokens = job.num_entries - window.first + job.num_draft - 1
        while not self._extend(window, num_tokens):
            idle = [w for w in self._windows.values() if w.block_table and w.last_used < self._num_proposals]
            if not idle:
                self._clear(window)
                return False
            self._clear(min(idle, key=lambda other: other.last_used))
        return True

    def _extend(self, window: _Window, num_tokens: int) -> bool:
        if window.block_table:
            return self.blocks.extend(window.block_table, num_tokens)
        return self.blocks.acquire(window.block_table, [], num_tokens)

    def _clear(self, window: _Window) -> None:
        self.blocks.release(window.block_table)
        window.end = window.first

    def _propose_chains(
        self, chains: GreedyChains, jobs: Sequence[_Job], trees: list[DraftTree]
    ) -> list[DraftTree]:
        """`propose` for greedy sequences, in one call."""
        added, num_fill = self._new_entries(jobs)
        asked = []
        for job, end in added:
            window, context, tail = job.window, job.context, job.context.hidden
            assert tail is not None
            asked.append(
                ChainJob(
                    token_ids=context.token_ids[window.end : end + 1],
                    hidden=tail.rows(window.end, end),
                    block_table=window.block_table,
                    start=window.end - window.first,
                    num_draft=job.num_draft if end == job.num_entries else 0,
                    truth=self._stop.truth(context.seq_id),
                )
            )
            window.end = end
        drafted, num_forwards, num_kv_tokens = chains(asked, self._stop.min_confidence, self._cache)
        self._work = num_forwards, num_kv_tokens, num_fill
        for (job, _), chain in zip(added, drafted, strict=True):
            self._stop.drafted(job.context.seq_id, chain.expected)
            trees[job.index] = DraftTree.chain(chain.token_ids, None)
        return trees

    def _new_entries(self, jobs: Sequence[_Job]) -> tuple[list[tuple[_Job, int]], int]:
        """The jobs with entries to be computed, up to which end each; and how many of the entries are of
        sequences that were behind by more than a draft."""
        budget, num_fill = self._catch_up_tokens, 0
        added = []
        for job in jobs:
            num_new = job.num_entries - job.window.end
            if num_new > self.num_speculative_tokens + 1:
                num_new = min(num_new, budget)
                budget -= num_new
                num_fill += num_new
            if num_new > 0:
                added.append((job, job.window.end + num_new))
        return added, num_fill

    def _catch_up(self, jobs: Sequence[_Job]) -> tuple[list[_Job], torch.Tensor]:
        """Compute the entries of tokens that are new; the jobs that are level now, with their newest
        guessed states, [num_jobs, hidden]."""
        rows: list[BatchRow] = []
        parts: list[torch.Tensor] = []
        before: list[int] = []
        level: list[_Job] = []
        ends: list[int] = []
        added, num_fill = self._new_entries(jobs)
        for job, end in added:
            window, tail = job.window, job.context.hidden
            assert tail is not None
            tokens = job.context.token_ids[window.end + 1 : end + 1]
            rows.append(BatchRow(tokens, window.end - window.first, window.block_table, 1))
            parts.append(tail.rows(window.end, end))
            before += job.context.token_ids[window.end : end]
            window.end = end
            ends.append(sum(map(len, parts)) - 1)
            if end == job.num_entries:
                level.append(job)
            else:
                ends.pop()
        if not rows:
            return [], torch.empty(0)
        hidden = self._forward(rows, before, torch.cat(parts))
        num_forwards, num_kv_tokens, _ = self._work
        self._work = num_forwards, num_kv_tokens, num_fill
        return level, hidden[ends]

    def _next_row(self, job: _Job) -> BatchRow:
        """The last drafted token, to be computed for the one after it."""
        start = job.num_entries - job.window.first + len(job.token_ids) - 1
        return BatchRow([job.token_ids[-1]], start, job.window.block_table, 1)

    def _forward(self, rows: Sequence[BatchRow], before: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Guessed hidden states of all the rows' entries, [num_entries, hidden]; `before`: the tokens
        before theirs."""
        batch = build_batch(rows, self.blocks.block_size, self._head.device)
        num_forwards, num_kv_tokens, num_fill = self._work
        num_kv_tokens += sum(row.start + len(row.token_ids) for row in rows)
        self._work = num_forwards + 1, num_kv_tokens, num_fill
        return self._head.forward(batch, torch.tensor(before, device=self._head.device), hidden, self._cache)

    def _draw(self, jobs: Sequence[_Job], logits: torch.Tensor) -> None:
        """Add the next draft token of every job; `logits` [num_jobs, draft vocabulary] are in their order."""
        sampled = [place for place, job in enumerate(jobs) if not job.is_greedy]
        if sampled:
            logits[sampled] = self._sampling_scores([jobs[place] for place in sampled], logits[sampled])
        token_ids = self._head.token_ids[torch.tensor(argmax_rows(logits), device=logits.device)].tolist()
        for job, token in zip(jobs, token_ids, strict=True):
            job.token_ids.append(token)

    def _sampling_scores(self, jobs: Sequence[_Job], logits: torch.Tensor) -> torch.Tensor:
        """Scores whose argmax is a sample of softmax(logits / temperature), with each job's keyed noise."""
        temperatures = torch.tensor([job.context.temperature for job in jobs], device=logits.device)
        scores = (logits - logits.amax(dim=1, keepdim=True)) / temperatures[:, None]
        for job, row in zip(jobs, scores, strict=True):
            if job.needs_probs:
                probs = torch.zeros(self._vocab_size, device=row.device)
                probs[self._head.token_ids] = row.softmax(0)
                job.probs.append(probs)
        keys = [job.context.generator.for_draft(len(job.context.token_ids)) for job in jobs]
        positions = [len(job.context.token_ids) + len(job.token_ids) for job in jobs]
        noise = gumbel_rows(keys, positions, self._vocab_size, scores.device)
        return scores + noise[:, self._head.token_ids]
