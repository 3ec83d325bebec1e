"""Sampled text keeps the target's distribution, whatever rule, draft and processors.

10,000 sequences are decoded to three tokens, drafting again after every refusal as the engine
does, and the joint counts of the three tokens are compared with the exact joint distribution by
chi-square. Seeds are fixed; on fresh seeds each case would fail by chance once in 10,000 times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState
from engine.kernels.reference_verify import distribution
from engine.spec.randomness import RandomKey, gumbel_rows
from engine.spec.tree import EMPTY_TREE, ROOT, DraftTree
from engine.spec.verify import SamplingState, verify
from engine.types import AcceptRule, GrammarSpec, SamplingParams

VOCAB = 5
LENGTH = 3
NUM_SEQUENCES = 10_000
ERROR_RATE = 1e-4
PROMPT = (1, 1, 2)
_TABLE_SIZE = 4096


@dataclass(frozen=True)
class World:
    """Target and draft logits as functions of the output so far; the draft is like the target."""

    target: torch.Tensor  # [_TABLE_SIZE, VOCAB]
    draft: torch.Tensor

    @classmethod
    def make(cls, seed: int) -> World:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(_TABLE_SIZE, VOCAB, generator=generator) * 1.2
        return cls(target, target + torch.randn(_TABLE_SIZE, VOCAB, generator=generator))


Drafting = Callable[[World, list["Decoded"]], list[DraftTree]]


@dataclass
class Decoded:
    """One sequence being decoded."""

    key: RandomKey
    temperature: float
    tokens: tuple[int, ...] = ()
    grammar: GrammarState | None = None

    @property
    def root(self) -> int:
        return len(PROMPT) + len(self.tokens)


def place(tokens: tuple[int, ...]) -> int:
    """Where the logits after `tokens` lie in the tables; no two short texts share a place."""
    index = 1
    for token in tokens:
        index = index * VOCAB + token
    return index % _TABLE_SIZE


def draw_next(
    world: World, sequences: list[Decoded], paths: list[tuple[int, ...]], width: int
) -> tuple[list[list[int]], torch.Tensor]:
    """`width` distinct tokens after each path, drawn as a sampling drafter does, and q.

    The largest of log q + Gumbel noise, in order, are a sample without replacement.
    """
    places = [place((*seq.tokens, *path)) for seq, path in zip(sequences, paths, strict=True)]
    temperatures = torch.tensor([seq.temperature for seq in sequences])
    scores = world.draft[places] / temperatures[:, None]
    keys = [seq.key.for_draft(seq.root) for seq in sequences]
    positions = [seq.root + len(path) for seq, path in zip(sequences, paths, strict=True)]
    order = (scores + gumbel_rows(keys, positions, VOCAB)).argsort(dim=1, descending=True)
    return order[:, :width].tolist(), scores.softmax(1)


def sampled_chain(world: World, sequences: list[Decoded]) -> list[DraftTree]:
    paths: list[tuple[int, ...]] = [()] * len(sequences)
    probs = []
    for _ in range(3):
        drawn, q = draw_next(world, sequences, paths, 1)
        probs.append(q)
        paths = [(*path, tokens[0]) for path, tokens in zip(paths, drawn, strict=True)]
    stacked = torch.stack(probs, dim=1)
    return [DraftTree.chain(path, stacked[i]) for i, path in enumerate(paths)]


def sampled_tree(world: World, sequences: list[Decoded]) -> list[DraftTree]:
    """Three siblings at the root, two under the first of them and one under the second."""
    top, q_top = draw_next(world, sequences, [()] * len(sequences), 3)
    under_first, q_first = draw_next(world, sequences, [(tokens[0],) for tokens in top], 2)
    under_second, q_second = draw_next(world, sequences, [(tokens[1],) for tokens in top], 1)
    parents = (ROOT, ROOT, ROOT, 0, 0, 1)
    probs = torch.stack([q_top, q_top, q_top, q_first, q_first, q_second], dim=1)
    tokens = [tuple(a + b + c) for a, b, c in zip(top, under_first, under_second, strict=True)]
    return [DraftTree(own, parents, probs[i]) for i, own in enumerate(tokens)]


def one_hot(make: Drafting) -> Drafting:
    return lambda world, sequences: [replace(tree, probs=None) for tree in make(world, sequences)]


def top_siblings(world: World, sequences: list[Decoded]) -> list[DraftTree]:
    """The draft's two best tokens and the best one under the first: deterministic, one-hot."""
    trees = []
    for seq in sequences:
        first, second = world.draft[place(seq.tokens)].topk(2).indices.tolist()
        third = int(world.draft[place((*seq.tokens, first))].argmax())
        trees.append(DraftTree((first, second, third), (ROOT, ROOT, 0)))
    return trees


def trimmed_chain(world: World, sequences: list[Decoded]) -> list[DraftTree]:
    """The draft knows three of the five tokens: the others come out all the same."""
    known = world.draft.clone()
    known[:, [1, 4]] = -torch.inf
    return sampled_chain(replace(world, draft=known), sequences)


def nothing(world: World, sequences: list[Decoded]) -> list[DraftTree]:
    return [EMPTY_TREE] * len(sequences)


Held = Callable[[], GrammarState | None]


def free() -> GrammarState | None:
    """No grammar."""
    return None


@cache
def _grammars() -> GrammarCompiler:
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate("$abcd")}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["$"])
    return GrammarCompiler(lambda: str(tokenizer.to_str()), VOCAB, frozenset({0}))


def held() -> GrammarState | None:
    """Every place forbids something, and what may come third depends on what came first."""
    return _grammars().start(GrammarSpec("start: /a[bcd][acd]+|b[ad][abd]+|d[bc]d+/"))


def decode(
    world: World, params: SamplingParams, rule: AcceptRule, draft: Drafting, seed: int, held: Held = free
) -> torch.Tensor:
    """Counts of the first LENGTH tokens, [VOCAB ** LENGTH]."""
    sequences = [
        Decoded(RandomKey(seed * NUM_SEQUENCES + i), params.temperature, grammar=held())
        for i in range(NUM_SEQUENCES)
    ]
    live = sequences
    while live:
        trees = draft(world, live)
        places: list[int] = []
        for seq, tree in zip(live, trees, strict=True):
            paths = [seq.tokens]
            for token, parent in zip(tree.token_ids, tree.parents, strict=True):
                paths.append((*paths[parent + 1], token))
            places += map(place, paths)
        states = [
            SamplingState(params, PROMPT, seq.tokens, frozenset({0}), seq.key, rule, seq.grammar)
            for seq in live
        ]
        result = verify(trees, world.target[places], states)
        for seq, tokens in zip(live, result.token_ids, strict=True):
            seq.tokens += tokens
        live = [seq for seq in live if len(seq.tokens) < LENGTH]
    cells = [place(seq.tokens[:LENGTH]) - VOCAB**LENGTH for seq in sequences]
    return torch.bincount(torch.tensor(cells), minlength=VOCAB**LENGTH)


def exact(world: World, params: SamplingParams, held: Held = free) -> torch.Tensor:
    """The joint distribution of the first LENGTH tokens under plain sampling."""
    joint = torch.ones(VOCAB**LENGTH, dtype=torch.float64)
    for cell, text in enumerate(product(range(VOCAB), repeat=LENGTH)):
        for i, token in enumerate(text):
            if joint[cell] == 0.0:
                break  # no text goes on from here
            state = SamplingState(
                params, PROMPT, text[:i], frozenset({0}), RandomKey(0), AcceptRule.RATIO, held()
            )
            joint[cell] *= distribution(world.target[place(text[:i])], state)[token]
    return joint


def p_value(counts: torch.Tensor, joint: torch.Tensor) -> float:
    """Chi-square goodness of fit; cells expected less than five times are taken together."""
    expected = joint * counts.sum()
    is_small = expected < 5.0
    seen = torch.cat([counts[~is_small].double(), counts[is_small].sum().double()[None]])
    due = torch.cat([expected[~is_small], expected[is_small].sum()[None]])
    if due[-1] < 5.0:  # too few even together: leave out, it cannot hide much
        seen, due = seen[:-1], due[:-1]
    return float(chi2.sf(float(((seen - due) ** 2 / due).sum()), len(due) - 1))


def check(params: SamplingParams, rule: AcceptRule, draft: Drafting, seed: int, held: Held = free) -> None:
    world = World.make(seed)
    joint = exact(world, params, held)
    counts = decode(world, params, rule, draft, seed, held)
    assert counts[joint == 0].sum() == 0, "a token came out that the processors forbid"
    assert p_value(counts, joint) > ERROR_RATE


PROCESSORS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.15, temperature=1.3),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4),
    "all": SamplingParams(
        temperature=0.9,
        top_k=4,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        logit_bias={3: 0.7},
        min_tokens=2,
    ),
}
DRAFTS: dict[str, tuple[AcceptRule, Drafting]] = {
    "ratio-chain": (AcceptRule.RATIO, sampled_chain),
    "ratio-tree": (AcceptRule.RATIO, sampled_tree),
    "block-chain": (AcceptRule.BLOCK, sampled_chain),
    "trimmed-ratio": (AcceptRule.RATIO, trimmed_chain),
    "trimmed-block": (AcceptRule.BLOCK, trimmed_chain),
    "keyed-chain": (AcceptRule.KEYED, sampled_chain),
    "keyed-tree": (AcceptRule.KEYED, sampled_tree),
    "one-hot-chain": (AcceptRule.RATIO, one_hot(sampled_chain)),
    "one-hot-siblings": (AcceptRule.RATIO, top_siblings),
    "no-draft": (AcceptRule.RATIO, nothing),
}


# Chains and trees each meet every processor here; the other pairs are marked slow.
EVERY_TIME = {
    ("all", "ratio-chain"),
    ("top-p", "ratio-chain"),
    ("penalties", "block-chain"),
    ("min-p", "block-chain"),
    ("top-k", "keyed-chain"),
    ("temperature", "one-hot-chain"),
    ("penalties", "ratio-tree"),
    ("top-p", "ratio-tree"),
    ("min-p", "keyed-tree"),
    ("top-k", "one-hot-siblings"),
    ("temperature", "one-hot-siblings"),
    ("top-p", "no-draft"),
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=() if case in EVERY_TIME else pytest.mark.slow)
    for case in product(PROCESSORS, DRAFTS)
]


@pytest.mark.parametrize(("processors", "draft"), CASES)
def test_joint_distribution_is_the_targets(processors: str, draft: str) -> None:
    rule, make = DRAFTS[draft]
    check(PROCESSORS[processors], rule, make, seed=1 + list(PROCESSORS).index(processors))


@pytest.mark.parametrize(
    "draft",
    [
        "ratio-tree",
        "one-hot-siblings",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("block-chain", "trimmed-ratio")),
    ],
)
def test_a_grammar_masks_the_target_and_nothing_else(draft: str) -> None:
    """The distribution is the target's over what may stand, though the drafter knows no grammar."""
    rule, make = DRAFTS[draft]
    check(SamplingParams(temperature=0.9, top_p=0.9), rule, make, seed=31, held=held)


def test_methods_that_take_turns_keep_the_distribution() -> None:
    """The policy changes within a sequence: sampled drafts, none, then one-hot ones."""

    def turns(world: World, sequences: list[Decoded]) -> list[DraftTree]:
        by_length = (sampled_chain, nothing, one_hot(sampled_chain))
        trees = [make(world, sequences) for make in by_length]
        return [trees[len(seq.tokens) % 3][i] for i, seq in enumerate(sequences)]

    check(SamplingParams(temperature=0.8), AcceptRule.BLOCK, turns, seed=21)


def test_the_check_sees_a_lossy_rule() -> None:
    """Deterministic siblings under the ratio rule, q taken for their distribution: known to be lossy."""

    def mislabelled(world: World, sequences: list[Decoded]) -> list[DraftTree]:
        trees = top_siblings(world, sequences)
        q = [world.draft[[place(seq.tokens)] * 3].softmax(1) for seq in sequences]
        return [replace(tree, probs=probs) for tree, probs in zip(trees, q, strict=True)]

    with pytest.raises(AssertionError):
        check(SamplingParams(), AcceptRule.RATIO, mislabelled, seed=3)


def test_the_check_sees_draft_noise_that_is_used_twice() -> None:
    """The block rule looks at drafts behind the refusal, so each step needs noise of its own."""

    def stale(world: World, sequences: list[Decoded]) -> list[DraftTree]:
        bound = [replace(seq, key=replace(seq.key, is_seeded=True)) for seq in sequences]
        return sampled_chain(world, bound)

    with pytest.raises(AssertionError):
        check(SamplingParams(), AcceptRule.BLOCK, stale, seed=5)
