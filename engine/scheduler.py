"""Who computes how many tokens in the coming step. Lists and integers; no torch.

One idea: every sequence has computed tokens that catch up with its tokens, drafts included. A
prompt chunk, a plain decode and a verify window are the same thing with other numbers.

The order within a step, under one budget of `max_batch_tokens`:

1. every decode gets its one token, preempting the worst-placed sequence where blocks run out;
2. running prefills, then admissions from the waiting line, get chunks of what is left, minus
   what draft windows ask for (at most half, so that neither can starve the other);
3. draft windows share the rest; they shrink, never preempt, and leave a block per decode free.

A sequence is admitted only when tokens are left after all that run had theirs. So never more
run than there are budget tokens, and a step reaches every decode and at least one prefill.

Sequences are served by (priority, arrival); the worst-placed is the last of them. A sequence
takes the blocks of all its tokens when it is admitted, so that only decodes can run out, and the
best-placed one can always finish: alone it fits (`capacity`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockManager, extend_hashes
from engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledStep:
    """Sequence i computes `num_new[i]` of its tokens and may have `max_draft[i]` draft tokens verified."""

    sequences: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    max_draft: list[int] = field(default_factory=list)
    num_decodes: int = 0  # sequences[:num_decodes] decode, the others prefill
    num_prefill_tokens: int = 0
    deciding: list[int] = field(default_factory=list)  # those whose tokens are then all computed
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, num_new: int) -> None:
        """Let `seq` compute `num_new` tokens."""
        if num_new == seq.num_uncomputed:
            self.deciding.append(len(self.sequences))
        self.sequences.append(seq)
        self.num_new.append(num_new)
        self.max_draft.append(0)


class Scheduler:
    """Keeps the waiting line and the running set, and plans one step at a time."""

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_sequences: int) -> None:
        if max_batch_tokens < 1 or max_sequences < 1:
            raise ValueError("max_batch_tokens and max_sequences must be at least 1")
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.waiting: list[Sequence] = []  # both sorted by Sequence.order, best-placed first
        self.running: list[Sequence] = []
        self.num_held = 0  # of those waiting, for whom the last step had no place or no blocks

    @property
    def capacity(self) -> int:
        """The longest sequence, in tokens, that fits when it runs alone."""
        return self.blocks.num_blocks * self.blocks.block_size

    def add(self, seq: Sequence) -> None:
        """Put `seq` into the waiting line."""
        insort(self.waiting, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands, and free its blocks."""
        line = self.running if seq.block_table else self.waiting
        line.remove(seq)
        self.blocks.release(seq.block_table)

    def schedule(self, wanted_drafts: Mapping[str, int]) -> ScheduledStep:
        """Plan the coming step. `wanted_drafts` maps a decoding sequence's id to its draft tokens."""
        step = ScheduledStep()
        self._schedule_decodes(step)
        num_left = self.max_batch_tokens - step.num_decodes
        wanted = [wanted_drafts.get(seq.seq_id, 0) for seq in step.sequences]
        num_chunk_tokens = num_left - min(sum(wanted), num_left // 2)
        self._schedule_prefills(step, num_chunk_tokens)
        has_blocks = not step.preempted and self._admit(step, num_chunk_tokens - step.num_prefill_tokens)
        has_room = has_blocks and len(self.running) < self.max_sequences
        self.num_held = 0 if has_room else len(self.waiting)
        if any(wanted):
            self._grant_drafts(step, wanted, num_left - step.num_prefill_tokens)
        return step

    def commit(self, seq: Sequence, num_computed: int) -> None:
        """`num_computed` tokens of `seq` are in the cache and will stay: offer full blocks for sharing."""
        seq.num_computed = num_computed
        if not self.blocks.enable_prefix_cache:
            return
        num_full = num_computed // self.blocks.block_size
        if num_full > len(seq.block_hashes):
            self._name_blocks(seq)
        for index in range(seq.num_committed_blocks, num_full):
            self.blocks.commit(seq.block_table[index], seq.block_hashes[index])
        seq.num_committed_blocks = max(num_full, seq.num_committed_blocks)

    def check_integrity(self) -> None:
        """Raises IntegrityError when blocks and tables disagree."""
        self.blocks.check_integrity(seq.block_table for seq in self.waiting + self.running)

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        for seq in [seq for seq in self.running if seq.is_decoding]:
            if not seq.block_table:
                continue  # preempted by a better-placed one just now
            if self._make_room(seq, step):
                step.add(seq, 1)
        step.num_decodes = len(step.sequences)

    def _make_room(self, seq: Sequence, step: ScheduledStep) -> bool:
        """A block for the next token of `seq`, at the cost of the worst-placed; False if that is itself."""
        num_tokens = seq.num_computed + 1
        if self.blocks.extend(seq.block_table, num_tokens):
            return True
        for other in self.running:  # blocks that rejected drafts left behind go first
            self.blocks.trim(other.block_table, len(other.token_ids))
        while not self.blocks.extend(seq.block_table, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.remove(seq)
        seq.forget_computed()
        seq.counters.num_preemptions += 1
        self.add(seq)

    def _schedule_prefills(self, step: ScheduledStep, num_tokens: int) -> None:
        for seq in self.running:
            if num_tokens == 0:
                break
            if not seq.is_decoding:
                num_tokens -= self._add_chunk(step, seq, num_tokens)

    def _admit(self, step: ScheduledStep, num_tokens: int) -> bool:
        """Let the best-placed waiting sequences in while there are tokens, blocks and places. False: for
        want of blocks one was not."""
        if not self.waiting:
            return True
        in_flight = {name for seq in self.running for name in _uncommitted_names(seq)}
        for seq in self.waiting[: self.max_sequences]:
            if num_tokens == 0 or len(self.running) == self.max_sequences:
                break
            prefix, next_name = self._find_prefix(seq)
            if next_name in in_flight:
                continue  # a running sequence is computing the same block: wait and share it
            num_spare = len(self.running)  # room to grow, so that admissions do not end in preemptions
            if not self.blocks.acquire(seq.block_table, prefix, len(seq.token_ids), num_spare):
                return False
            self.waiting.remove(seq)
            insort(self.running, seq, key=_order)
            seq.num_computed = len(prefix) * self.blocks.block_size
            seq.num_committed_blocks = len(prefix)
            if seq.counters.num_preemptions == 0:
                seq.counters.num_cached_tokens = seq.num_computed
            in_flight.update(_uncommitted_names(seq))
            num_tokens -= self._add_chunk(step, seq, num_tokens)
        return True

    def _find_prefix(self, seq: Sequence) -> tuple[list[int], bytes | None]:
        """Cached blocks that `seq` can start from, and the name of the block it would need next.

        At least one token is always left to compute, since only a forward gives logits.
        """
        if not self.blocks.enable_prefix_cache or seq.needs_prompt_logprobs:
            return [], None
        self._name_blocks(seq)
        names = seq.block_hashes[: (len(seq.token_ids) - 1) // self.blocks.block_size]
        prefix = self.blocks.find_prefix(names)
        return prefix, names[len(prefix)] if len(prefix) < len(names) else None

    def _name_blocks(self, seq: Sequence) -> None:
        extend_hashes(seq.block_hashes, seq.token_ids, self.blocks.block_size, seq.request.cache_salt)

    def _add_chunk(self, step: ScheduledStep, seq: Sequence, num_tokens: int) -> int:
        num_new = min(seq.num_uncomputed, num_tokens)
        step.add(seq, num_new)
        step.num_prefill_tokens += num_new
        return num_new

    def _grant_drafts(self, step: ScheduledStep, wanted: list[int], num_tokens: int) -> None:
        """Share `num_tokens` among the draft windows: exact ones first, the others equally."""
        asking = [index for index, num in enumerate(wanted) if num > 0]
        asking.sort(key=lambda i: (not step.sequences[i].request.policy.is_exact, wanted[i]))
        for num_before, index in enumerate(asking):
            seq = step.sequences[index]
            share = num_tokens
            if not seq.request.policy.is_exact:  # smallest wish first: what it leaves goes to the rest
                share = num_tokens // (len(asking) - num_before)
            # One block per decode stays free: a draft must not cause a preemption.
            num_blocks = len(seq.block_table) + max(self.blocks.num_free - step.num_decodes, 0)
            num_slots = num_blocks * self.blocks.block_size - len(seq.token_ids)
            num_draft = max(0, min(wanted[index], share, seq.num_remaining - 1, num_slots))
            self.blocks.extend(seq.block_table, len(seq.token_ids) + num_draft)
            step.max_draft[index] = num_draft
            num_tokens -= num_draft


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


def _uncommitted_names(seq: Sequence) -> list[bytes]:
    return seq.block_hashes[seq.num_committed_blocks :]
