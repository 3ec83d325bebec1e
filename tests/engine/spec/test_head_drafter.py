"""The draft head: what it computes is what was trained, it loses nothing, and its windows are bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.batch import BatchRow, build_batch
from engine.config import DraftModelConfig
from engine.errors import DrafterMismatch
from engine.hidden_tail import HiddenTail
from engine.kernels import native
from engine.kv.block_manager import new_block_table
from engine.models.draft_head import DraftHead, DraftHeadConfig, head_spec
from engine.models.interface import LanguageModel
from engine.models.quantised import build_quantised
from engine.models.tiny import random_weights, tiny_model, tiny_spec
from engine.models.weights import DictWeights
from engine.spec.check_drafter import check_drafter
from engine.spec.drafter import DraftContext
from engine.spec.head_drafter import DraftHeadDrafter
from engine.spec.randomness import RandomKey
from engine.training.head_module import DraftHeadModule, embed_entries
from engine.types import SamplingParams
from tests.engine.harness import GREEDY, drive, make_engine, prompt, reference_greedy, request, target
from tests.engine.heads import head_drafter, head_weights, tiny_head
from tests.engine.test_hidden_tail import reference_hidden


def hidden_of(model: LanguageModel, token_ids: Sequence[int], first: int = 0) -> HiddenTail:
    """The tail an engine would have for this text, from position `first` on."""
    tail = HiddenTail(max(len(token_ids), 1))
    if len(token_ids) > 1:
        tail.append(first, reference_hidden(model, token_ids[:-1])[first:])
    return tail


def context(token_ids: Sequence[int], first: int = 0, num: int = 4, temperature: float = 0.0) -> DraftContext:
    tail = hidden_of(target(), token_ids, first)
    return DraftContext("a", token_ids, 1, num, temperature, tail.newest, RandomKey(1), "", "", tail)


@torch.inference_mode()
def guesses(head: DraftHead, token_ids: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
    """The head's states over tokens 1 to the last, from one forward: [len - 1, hidden]."""
    table = new_block_table()
    table.append(0)
    batch = build_batch([BatchRow(token_ids[1:], 0, table, 0)], len(token_ids), head.device)
    before = torch.tensor(token_ids[:-1])
    return head.forward(batch, before, hidden, head.new_cache(1, len(token_ids)))


@pytest.mark.parametrize("num_input_tokens", [1, 2])
def test_the_engine_computes_what_was_trained(num_input_tokens: int) -> None:
    """The first round in one forward, and the later ones token by token, as drafting does."""
    module = DraftHeadModule(head_spec(target().spec), num_input_tokens)
    module.load_state_dict(head_weights(target(), num_input_tokens=num_input_tokens))
    head = tiny_head(target(), range(target().spec.vocab_size), num_input_tokens=num_input_tokens)
    text = prompt(4, 20)
    hidden = reference_hidden(target(), text)
    table_of_target = target().embed(torch.arange(target().spec.vocab_size))
    embedded = embed_entries(table_of_target, torch.tensor(text), num_input_tokens)
    with torch.inference_mode():
        rounds = module(embedded[None], hidden[None, :-1], 3)
    assert torch.allclose(guesses(head, text, hidden[:-1]), rounds[0][0], atol=1e-4)
    # A chain that happens to draft the text itself: entry j of round k ends the chain begun at j - k + 1.
    for start in (3, 9):
        table = new_block_table()
        table.append(0)
        cache = head.new_cache(1, 32)
        rows, states = list(text[1 : start + 2]), hidden[: start + 1]
        before = list(text[: start + 1])
        at = 0
        for k in range(3):
            batch = build_batch([BatchRow(rows, at, table, 1)], 32, head.device)
            with torch.inference_mode():
                guess = head.forward(batch, torch.tensor(before), states, cache)[-1:]
            assert torch.allclose(guess[0], rounds[k][0, start + k], atol=1e-4), (start, k)
            at, before, rows, states = start + 1 + k, rows[-1:], [text[start + 2 + k]], guess


def test_only_the_draft_vocabulary_is_drafted_and_probs_say_so() -> None:
    ids = (3, 7, 11, 40)
    drafter = head_drafter(target(), ids)
    greedy, sampled = (drafter.propose([context(prompt(2, 9), temperature=t)])[0] for t in (0.0, 1.0))
    assert set(greedy.token_ids) | set(sampled.token_ids) <= set(ids)
    assert greedy.probs is None
    assert sampled.probs is not None
    assert sampled.probs.shape == (4, target().spec.vocab_size)
    assert torch.allclose(sampled.probs.sum(1), torch.ones(4))
    assert sampled.probs[:, list(ids)].sum() == pytest.approx(4.0, abs=1e-4)


def test_a_warm_window_drafts_what_a_cold_one_does() -> None:
    text = list(prompt(6, 30))
    warm = head_drafter(target(), context_tokens=64)
    for length in (5, 6, 9, 10, 17, 30):
        cold = head_drafter(target(), context_tokens=64)
        due = cold.propose([context(text[:length])])[0].token_ids
        assert warm.propose([context(text[:length])])[0].token_ids == due
        assert warm.propose([context(text[:length])])[0].token_ids == due, "asked again without a new token"


def test_missing_states_begin_a_new_window() -> None:
    text = prompt(6, 30)
    drafter = head_drafter(target(), context_tokens=64)
    drafter.propose([context(text[:8])])
    late = context(text, first=20)
    tree = drafter.propose([late])[0]
    assert tree.token_ids == head_drafter(target(), context_tokens=64).propose([late])[0].token_ids
    assert len(tree) == 4
    drafter.check_integrity()


def test_windows_are_bounded() -> None:
    drafter = head_drafter(target(), context_tokens=8)
    text = list(prompt(6, 100))
    for length in range(2, 100):
        assert len(drafter.propose([context(text[:length])])[0]) == 4
        drafter.check_integrity()
        assert drafter.blocks.num_used <= (2 * 8 + 4) // 4 + 1


def test_without_states_there_is_no_draft() -> None:
    drafter = head_drafter(target())
    bare = replace(context(prompt(2, 9)), hidden=None)
    one = context(prompt(2, 1))
    behind = replace(context(prompt(2, 9)), hidden=hidden_of(target(), prompt(2, 7)))
    assert [len(tree) for tree in drafter.propose([bare, one, behind])] == [0, 0, 0]


def test_a_long_window_is_caught_up_over_several_steps() -> None:
    drafter = head_drafter(target(), context_tokens=16, catch_up_tokens=20)
    many = [replace(context(prompt(n, 30)), seq_id=str(n)) for n in range(8)]
    lengths = [[len(tree) for tree in drafter.propose(many)] for _ in range(10)]
    assert 0 in lengths[0]
    assert 0 not in lengths[-1]


def test_the_contract_is_kept() -> None:
    def held(drafter: object) -> int:
        assert isinstance(drafter, DraftHeadDrafter)
        drafter.check_integrity()
        return drafter.num_sequences + drafter.blocks.num_used

    model = tiny_model(vocab_size=128)
    for num_blocks in (200, 24):
        faults = check_drafter(
            lambda n=num_blocks: head_drafter(model, num_blocks=n),  # type: ignore[misc]
            128,
            held=held,
            hidden=lambda token_ids: reference_hidden(model, token_ids),
        )
        assert faults == []


def test_drafting_is_part_of_every_text_it_should_be() -> None:
    """Through the engine: prefix cache hits, preemptions and chunked prompts still give drafts."""
    drafter = head_drafter(target(), context_tokens=16)
    engine = make_engine({"draft": drafter}, num_blocks=30, max_batch_tokens=24)
    prompts = [prompt(5, 40), prompt(5, 40) + prompt(6, 9), prompt(7, 3), (5,) * 30]
    for turn in range(2):
        run = drive(engine, [request(f"{turn}-{i}", ids, policy="draft") for i, ids in enumerate(prompts)])
        assert not any(record.drafter_errors for record in run.records)
        for i, ids in enumerate(prompts):
            done = run.finished[f"{turn}-{i}"]
            assert done.token_ids == reference_greedy(target(), ids, GREEDY.max_tokens)
            assert done.stats is not None
            (counts,) = done.stats.by_method
            assert counts.num_drafts == counts.num_steps > 0, "whoever was granted a draft got one"
    assert drafter.num_sequences == drafter.blocks.num_used == 0


def test_records_tell_how_much_of_a_new_sequence_is_read() -> None:
    """A window of 24 of a prompt of 60, and of the second time only what the prefix cache does not hold."""
    engine = make_engine({"draft": head_drafter(target(), context_tokens=24)}, num_blocks=60)
    told = []
    for turn in range(2):
        run = drive(engine, [request(f"r{turn}", prompt(5, 60), policy="draft")])
        works = [work for record in run.records for work in record.drafts]
        told.append((sum(w.num_begun_tokens for w in works), sum(w.num_begun_fill for w in works)))
    assert told[0] == (61, 24)
    assert told[1][0] == 61
    assert told[1][1] < 24


def test_seeded_text_is_the_same_with_and_without() -> None:
    engine = make_engine({"draft": head_drafter(target())})
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)
    run = drive(engine, [request(policy, prompt(3, 12), params, policy) for policy in ("baseline", "draft")])
    assert run.finished["draft"].token_ids == run.finished["baseline"].token_ids


@pytest.mark.skipif(native.load_library() is None, reason="no C compiler on this machine")
def test_integers_give_nearly_the_same_states() -> None:
    spec = tiny_spec(vocab_size=64)
    weights = DictWeights(random_weights(spec, seed=3))
    model = build_quantised(spec, weights)
    plain = tiny_model(seed=3, vocab_size=64)
    text = prompt(4, 20)
    own = head_weights(plain)
    hidden = reference_hidden(plain, text)[:-1]
    exact = guesses(tiny_head(plain, weights=own), text, hidden)
    close = guesses(tiny_head(model, weights=own), text, hidden)
    assert torch.nn.functional.cosine_similarity(exact, close).min() > 0.98
    embedded = model.embed(torch.tensor(text))
    table = new_block_table()
    table.append(0)
    batch = build_batch([BatchRow(text, 0, table, 0)], 32, model.device)
    assert torch.equal(
        model.forward(batch, model.new_cache(1, 32)), model.forward(batch, model.new_cache(1, 32), embedded)
    )


@pytest.mark.skipif(native.load_library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("num_input_tokens", [1, 2])
@pytest.mark.parametrize("min_confidence", [0.0, 0.03, 0.2])
def test_chains_in_one_call_are_those_made_token_by_token(
    num_input_tokens: int, min_confidence: float
) -> None:
    """Over growing texts, several at a time, some behind by more than can be caught up at once."""
    spec = tiny_spec(vocab_size=64)
    model = build_quantised(spec, DictWeights(random_weights(spec, seed=3)))
    weights = head_weights(tiny_model(seed=3, vocab_size=64), num_input_tokens=num_input_tokens)
    config = DraftModelConfig(min_confidence=min_confidence, catch_up_tokens=20)
    drafters = []
    for is_fast in (True, False):
        head = tiny_head(model, range(1, 64, 2), weights=weights, num_input_tokens=num_input_tokens)
        assert head.greedy_chains is not None
        if not is_fast:
            head.greedy_chains = None
        drafters.append(DraftHeadDrafter(head, config, num_blocks=64, block_size=4))
    texts = {"a": prompt(4, 70), "b": prompt(5, 40), "c": prompt(6, 60)}
    hidden = {name: reference_hidden(model, text) for name, text in texts.items()}
    rng = random.Random(1)
    lengths = {"a": 30, "b": 2, "c": 13}
    num_drafted = 0
    for step in range(14):
        contexts = []
        for name, length in lengths.items():
            tail = HiddenTail(64)
            tail.append(0, hidden[name][: length - 1])
            wanted = 0 if rng.random() < 0.2 else rng.randint(1, 5)
            ids = texts[name][:length]
            key = RandomKey(1)
            contexts.append(DraftContext(name, ids, 1, wanted, 0.0, None, key, "", "", tail))
        trees, expected = (drafter.propose(contexts) for drafter in drafters)
        assert [tree.token_ids for tree in trees] == [tree.token_ids for tree in expected], step
        assert drafters[0].work() == drafters[1].work()
        num_drafted += sum(map(len, trees))
        for name, tree in zip(lengths, trees, strict=True):
            num_new = rng.randint(1, 3)
            for drafter in drafters:
                drafter.observe(name, texts[name][lengths[name] :][:num_new], min(num_new - 1, len(tree)))
            lengths[name] = min(lengths[name] + num_new, len(texts[name]))
    assert num_drafted > (20 if min_confidence < 0.1 else 3)
    for drafter in drafters:
        drafter.check_integrity()
        for name in lengths:
            drafter.end(name)
        assert drafter.blocks.num_used == 0


def test_a_head_of_another_target_is_refused() -> None:
    config = DraftHeadConfig(1, 999, 1, target().spec.vocab_size, "another", 16, (1, 2))
    with pytest.raises(DrafterMismatch, match="hidden_size 999"):
        config.spec(target().spec)
