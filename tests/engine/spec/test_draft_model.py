"""The draft model's cache stays true through rejections, pauses, preemption and shortage."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import BatchRow, build_batch
from engine.config import DraftModelConfig
from engine.errors import DrafterMismatch
from engine.kv.block_manager import BlockManager, new_block_table
from engine.models.llama import CausalLM
from engine.models.tiny import tiny_model
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import DraftContext
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree

VOCAB = 64
TARGET = tiny_model(num_layers=2, vocab_size=VOCAB, max_model_len=256)


def drafter(num_blocks: int = 256, catch_up_tokens: int = 256, model: CausalLM = TARGET) -> DraftModelDrafter:
    config = DraftModelConfig(layers_of_target=1, catch_up_tokens=catch_up_tokens)
    return DraftModelDrafter(model.first_layers(1), TARGET.spec, config, num_blocks=num_blocks, block_size=4)


def context(
    tokens: Sequence[int],
    num: int = 4,
    *,
    seq_id: str = "a",
    temperature: float = 0.0,
    key: RandomKey | None = None,
    salt: str | None = None,
) -> DraftContext:
    return DraftContext(seq_id, tokens, 1, num, temperature, None, key or RandomKey(1), salt)


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """The draft's logits computed in one go in a fresh cache."""
    model = TARGET.first_layers(1)
    table = new_block_table()
    blocks = BlockManager(64, 4)
    blocks.extend(table, len(tokens))
    batch = build_batch([BatchRow(list(tokens), 0, table, 1)], 4, model.device)
    with torch.inference_mode():
        return model.logits(model.forward(batch, model.new_cache(64, 4))[batch.logits_rows])[0]


def expected_chain(tokens: Sequence[int], num: int) -> tuple[int, ...]:
    text = list(tokens)
    for _ in range(num):
        text.append(int(logits_after(text).argmax()))
    return tuple(text[len(tokens) :])


def ids(trees: Sequence[DraftTree]) -> list[tuple[int, ...]]:
    return [tree.token_ids for tree in trees]


@given(st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_drafts_are_those_of_a_fresh_cache_whatever_happened_before(seed: int) -> None:
    """Random lengths, acceptances, pauses and preemptions; the cache must never lie."""
    dice = random.Random(seed)
    own = drafter()
    texts = {name: [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))] for name in "abc"}
    for _ in range(7):
        asked = [name for name in texts if dice.random() < 0.7]
        nums = {name: dice.randint(1, 5) for name in asked}
        trees = own.propose([context(texts[name], nums[name], seq_id=name) for name in asked])
        own.check_integrity()
        for name, tree in zip(asked, trees, strict=True):
            assert tree.token_ids == expected_chain(texts[name], nums[name])
            assert tree.probs is None
        for name in texts:
            drafted = dict(zip(asked, ids(trees), strict=True)).get(name, ())
            num_accepted = dice.randint(0, len(drafted))
            texts[name] += [*drafted[:num_accepted], dice.randrange(VOCAB)]
        if dice.random() < 0.3:
            own.end(dice.choice("abc"))
    for name in texts:
        own.end(name)
    assert own.num_sequences == own.blocks.num_used == 0


def test_one_forward_a_draft_token_for_the_whole_batch() -> None:
    own = drafter()
    texts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    own.propose([context(text, num, seq_id=str(num)) for num, text in zip((4, 2, 1), texts, strict=True)])
    assert own.work() == (4, (3 + 5 + 1) + (4 + 6) + 5 + 6, 0)


def test_catching_up_is_bounded_and_gives_no_draft_meanwhile() -> None:
    own = drafter(catch_up_tokens=10)
    long, short = list(range(25)), [1, 2]
    seen = []
    for _ in range(3):
        trees = own.propose([context(long, seq_id="long"), context(short, seq_id="short")])
        seen.append([len(tree) for tree in trees])
    assert seen == [[0, 4], [0, 4], [4, 4]]
    assert trees[0].token_ids == expected_chain(long, 4)


def test_a_draft_never_leaves_the_drafts_context() -> None:
    model = tiny_model(num_layers=1, vocab_size=VOCAB, max_model_len=16)
    own = drafter(model=model)
    lengths = [len(own.propose([context([1] * n, 4)])[0]) for n in range(11, 19)]
    assert lengths == [4, 4, 4, 3, 2, 1, 0, 0]
    own.check_integrity()


def test_without_blocks_there_is_no_draft_and_no_error() -> None:
    own = drafter(num_blocks=8)  # 32 tokens
    texts = [[1] * 12, [2] * 12, [3] * 12]
    contexts = [context(text, 4, seq_id=str(i)) for i, text in enumerate(texts)]
    assert [len(tree) for tree in own.propose(contexts)] == [4, 4, 0]
    assert own.work()[0] == 4
    # The first two are over, or another method drafts for them: their blocks serve the third.
    assert [len(tree) for tree in own.propose(contexts[2:])] == [4]
    assert own.propose(contexts[:1])[0].token_ids == expected_chain(texts[0], 4)
    assert [len(tree) for tree in own.propose([context([1] * 40, 4, seq_id="huge")])] == [0]
    own.check_integrity()


def test_a_prefix_is_shared_between_equal_salts_only() -> None:
    own = drafter(catch_up_tokens=8)
    prompt = list(range(30))

    def steps_until_drafting(seq_id: str, salt: str | None) -> int:
        for step in range(1, 9):
            if len(own.propose([context(prompt, seq_id=seq_id, salt=salt)])[0]):
                return step
        raise AssertionError("never caught up")

    assert steps_until_drafting("a", "x") == 4
    assert steps_until_drafting("b", "x") == 1
    own.check_integrity()
    assert steps_until_drafting("c", "y") == 4
    assert steps_until_drafting("d", None) == 4
    assert steps_until_drafting("e", None) == 4
    own.end("a")
    assert steps_until_drafting("f", "x") == 1
    assert own.propose([context(prompt, seq_id="f", salt="x")])[0].token_ids == expected_chain(prompt, 4)
    for name in "bcdef":
        own.end(name)
    own.check_integrity()
    assert own.blocks.num_used == 0


def test_sampled_drafts_carry_the_distribution_they_came_from() -> None:
    own = drafter()
    text = [5, 6, 7]
    (tree,) = own.propose([context(text, 3, temperature=0.7)])
    assert tree.probs is not None
    for node, token in enumerate(tree.token_ids):
        path = [*text, *tree.token_ids[:node]]
        expected = (logits_after(path) / 0.7).softmax(0)
        torch.testing.assert_close(tree.probs[node], expected, atol=1e-5, rtol=1e-4)
        noise = RandomKey(1).for_draft(len(text)).gumbel(len(path), VOCAB)
        assert token == int((expected.log() + noise).argmax())


def test_seeded_drafts_use_the_targets_noise_and_need_no_distribution() -> None:
    own = drafter()
    text = [5, 6, 7]
    key = RandomKey(9, is_seeded=True)
    (tree,) = own.propose([context(text, 3, temperature=1.0, key=key)])
    assert tree.probs is None
    assert tree.token_ids[0] == int((logits_after(text).log_softmax(0) + key.gumbel(3, VOCAB)).argmax())


def test_greedy_and_sampled_share_a_batch() -> None:
    own = drafter()
    contexts = [
        context([1, 2], seq_id="a", temperature=0.9, key=RandomKey(3)),
        context([1, 2], seq_id="b"),
        context([1, 2], seq_id="c", temperature=0.9, key=RandomKey(4)),
    ]
    together = own.propose(contexts)
    alone = [drafter().propose([one])[0] for one in contexts]
    assert ids(together) == ids(alone)
    assert together[1].token_ids == expected_chain([1, 2], 4)


def test_another_vocabulary_is_refused_by_name() -> None:
    other = tiny_model("qwen2", num_layers=1, vocab_size=VOCAB + 1)
    with pytest.raises(DrafterMismatch, match=r"tiny-qwen2.*65 tokens.*tiny-llama.*64"):
        DraftModelDrafter(other, TARGET.spec, DraftModelConfig(), num_blocks=8, block_size=4)
