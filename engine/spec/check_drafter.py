"""The drafter contract as a function: run it against every speculation method, yours included.

It plays a few sequences through propose / observe / end as the engine would, with accepted and
rejected drafts, steps without the drafter, and ends in the middle, and says what it saw wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.hidden_tail import HiddenTail
from engine.spec.drafter import DraftContext, Drafter
from engine.spec.faults import find_faults
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree

HiddenStates = Callable[[Sequence[int]], torch.Tensor]
"""A target's last hidden states over a text, [num_tokens, hidden]."""

_NUM_STEPS = 10
_PROBS_TOLERANCE = 1e-4  # a warm cache may compute in other pieces than a cold one


@dataclass(slots=True)
class _Played:
    """One sequence of the play."""

    seq_id: str
    prompt: list[int]
    temperature: float
    key: RandomKey
    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    hidden: HiddenStates | None = None


def check_drafter(
    make_drafter: Callable[[], Drafter],
    vocab_size: int,
    *,
    held: Callable[[Drafter], int] | None = None,
    hidden: HiddenStates | None = None,
    seed: int = 0,
) -> list[str]:
    """Every breach of the contract found, in words; an empty list for a good drafter.

    `held` measures what a drafter holds for its sequences (entries, blocks); after `end` it must
    be what it was at first. `hidden` gives a target's hidden states over a text, for a drafter that
    reads them. Checked: never more than `max_draft_tokens` nodes; well-formed trees
    of valid token ids and distributions; contexts not mutated; empty context, empty tree; same
    seed, same tree, also after `end` and a new `begin`; `end` frees all and ignores unknown ids.
    """
    faults: list[str] = []
    drafter = make_drafter()
    before = held(drafter) if held else 0
    play = partial(_play, vocab_size=vocab_size, hidden=hidden, seed=seed, faults=faults)
    first = play(drafter, "salt 1")
    if held and held(drafter) != before:
        faults.append(f"after `end` of all sequences {held(drafter)} things are held, {before} at first")
    # Another salt: what a drafter may share between equal prefixes would make it faster, not other.
    again = play(drafter, "salt 2")
    faults += _differences(first, again, "the same drafter after `end`")
    again = play(make_drafter(), "salt 1")
    faults += _differences(first, again, "a new drafter")
    _check_empty(make_drafter(), faults)
    return list(dict.fromkeys(faults))


def _play(
    drafter: Drafter,
    salt: str,
    *,
    vocab_size: int,
    hidden: HiddenStates | None,
    seed: int,
    faults: list[str],
) -> list[DraftTree]:
    """All trees of one fixed course of events. What is accepted depends on `seed` only."""
    dice = random.Random(seed)
    cast = _cast(dice, salt, vocab_size)
    for seq in cast:
        seq.hidden = hidden
    for seq in cast:
        drafter.begin(seq.seq_id, tuple(seq.prompt))
    trees: list[DraftTree] = []
    for step in range(_NUM_STEPS):
        away = cast[step % len(cast)] if step % 2 else None  # its policy is off in this step
        if step == _NUM_STEPS // 2:  # preempted: it comes back with all its tokens
            drafter.end(cast[0].seq_id)
            drafter.begin(cast[0].seq_id, tuple(cast[0].tokens))
        asked = [seq for seq in cast if seq is not away]
        proposed = _propose(drafter, asked, dice, vocab_size, faults)
        trees += proposed
        for seq in cast:
            tree = proposed[asked.index(seq)] if seq in asked and len(proposed) == len(asked) else DraftTree()
            num_accepted = dice.randint(0, len(tree)) if tree.is_chain else 0
            committed = [*tree.token_ids[:num_accepted], dice.randrange(vocab_size)]
            seq.tokens += committed
            drafter.observe(seq.seq_id, tuple(committed), num_accepted)
    for seq in cast:
        drafter.end(seq.seq_id)
        drafter.end(seq.seq_id)
    drafter.end("never begun")
    return trees


def _cast(dice: random.Random, salt: str, vocab_size: int) -> list[_Played]:
    """Greedy, sampled and seeded sequences over repetitive text, short and long."""
    words = [[dice.randrange(vocab_size) for _ in range(4)] for _ in range(3)]
    cast = []
    for index, (length, temperature, is_seeded) in enumerate(
        [(1, 0.0, False), (9, 0.0, False), (30, 0.8, False), (30, 0.8, True), (90, 1.5, False)]
    ):
        prompt: list[int] = []
        while len(prompt) < length:
            prompt += dice.choice(words)
        seq = _Played(f"seq-{index}", prompt[:length], temperature, RandomKey(index + 1, is_seeded), salt)
        seq.tokens = list(seq.prompt)
        cast.append(seq)
    return cast


def _propose(
    drafter: Drafter, asked: Sequence[_Played], dice: random.Random, vocab_size: int, faults: list[str]
) -> list[DraftTree]:
    contexts = [_context(seq, dice.randint(1, 6)) for seq in asked]
    copies = [list(seq.tokens) for seq in asked]
    trees = drafter.propose(contexts)
    if len(trees) != len(contexts):
        faults.append(f"`propose` gave {len(trees)} trees for {len(contexts)} contexts")
    for seq, copy in zip(asked, copies, strict=True):
        if seq.tokens != copy:
            faults.append("`propose` changed a context's token_ids")
    pairs = list(zip(contexts, trees, strict=False))
    granted = [context.max_draft_tokens for context, _ in pairs]
    found = find_faults([tree for _, tree in pairs], granted, vocab_size, are_chains=False)
    faults += [fault.message for fault in found.values()]
    for context, tree in pairs:
        if context.temperature == 0.0 and tree.probs is not None:
            faults.append("a greedy context got a draft with probs; it must be one-hot")
    work = drafter.work()
    if min(work) < 0:
        faults.append(f"`work` is {work}; counts cannot be negative")
    return trees


def _context(seq: _Played, max_draft_tokens: int) -> DraftContext:
    tail = None
    if seq.hidden is not None and len(seq.tokens) > 1:
        tail = HiddenTail(len(seq.tokens))
        tail.append(0, seq.hidden(seq.tokens[:-1]))
    return DraftContext(
        seq_id=seq.seq_id,
        token_ids=seq.tokens,
        prompt_length=len(seq.prompt),
        max_draft_tokens=max_draft_tokens,
        temperature=seq.temperature,
        last_hidden=None if tail is None else tail.newest,
        generator=seq.key,
        cache_salt=seq.salt,
        hidden=tail,
    )


def _check_empty(drafter: Drafter, faults: list[str]) -> None:
    nothing = _Played("empty", [], 0.0, RandomKey(1))
    some = _Played("some", [1, 2, 1, 2, 1], 0.0, RandomKey(1))
    some.tokens = list(some.prompt)
    for seq in (nothing, some):
        drafter.begin(seq.seq_id, tuple(seq.tokens))
    for trees, words in (
        (drafter.propose([_context(nothing, 4)]), "no tokens"),
        (drafter.propose([_context(some, 0)]), "max_draft_tokens 0"),
    ):
        if [len(tree) for tree in trees] != [0]:
            faults.append(f"a context with {words} must get an empty tree")
    if drafter.propose([]) != []:
        faults.append("no contexts must give no trees")
    for seq in (nothing, some):
        drafter.end(seq.seq_id)


def _differences(first: Sequence[DraftTree], second: Sequence[DraftTree], who: str) -> list[str]:
    for one, other in zip(first, second, strict=False):
        is_same = (one.token_ids, one.parents) == (other.token_ids, other.parents)
        if is_same and one.probs is not None and other.probs is not None:
            is_same = torch.allclose(one.probs, other.probs, atol=_PROBS_TOLERANCE)
        if not is_same or (one.probs is None) != (other.probs is None):
            return [f"same seed, but another tree from {who}: {one.token_ids} and {other.token_ids}"]
    return []
