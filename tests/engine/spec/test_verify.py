"""Verification against the reference rules, and what must hold whatever the draft was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidLogits
from engine.kernels import CHOICE_VARIABLE, reference_verify
from engine.sampling import LogitsRow, choose
from engine.spec.faults import find_faults
from engine.spec.randomness import RandomKey
from engine.spec.tree import EMPTY_TREE, ROOT, DraftTree
from engine.spec.verify import SamplingState, accept_rule, verify
from engine.types import AcceptRule, SamplingParams

VOCAB = 12
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["auto", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for the C kernels and for torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE_VARIABLE, request.param)
        yield


def state(
    params: SamplingParams = GREEDY,
    *,
    seed: int = 1,
    is_seeded: bool = False,
    rule: AcceptRule = AcceptRule.RATIO,
    output: tuple[int, ...] = (),
) -> SamplingState:
    return SamplingState(params, (1, 2, 3), output, frozenset({0}), RandomKey(seed, is_seeded), rule)


def rows_for(*best: int) -> torch.Tensor:
    """Logits whose argmax, row by row, is as given."""
    logits = torch.zeros(len(best), VOCAB)
    for row, token in enumerate(best):
        logits[row, token] = 5.0
    return logits


def sampled_tree(parents: tuple[int, ...], generator: torch.Generator) -> DraftTree:
    """Random q's, and tokens drawn from them, siblings without replacement."""
    q = (torch.randn(len(parents), VOCAB, generator=generator) * 1.5).softmax(1)
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        siblings = [i for i in range(node) if parents[i] == parent]
        if siblings:  # they share one q
            q[node] = q[siblings[0]]
        left = q[node].clone()
        left[[tokens[i] for i in siblings]] = 0.0
        tokens.append(int(torch.multinomial(left, 1, generator=generator)))
    return DraftTree(tuple(tokens), parents, q)


shapes = st.integers(0, 6).flatmap(lambda n: st.tuples(*(st.integers(ROOT, node - 1) for node in range(n))))
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 4]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    min_tokens=st.sampled_from([0, 3]),
)


# --- parity with the reference ----------------------------------------------------------------


@given(
    st.integers(0, 2**31), st.lists(st.tuples(shapes, any_params, st.booleans(), st.booleans()), max_size=5)
)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_a_mixed_batch_matches_the_reference(
    rule: AcceptRule, seed: int, batch: list[tuple[tuple[int, ...], SamplingParams, bool, bool]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    trees, states, logits = [], [], []
    for index, (parents, params, is_one_hot, is_seeded) in enumerate(batch):
        tree = sampled_tree(parents, generator)
        trees.append(replace(tree, probs=None) if is_one_hot or params.is_greedy else tree)
        states.append(state(params, seed=seed + index, is_seeded=is_seeded, rule=rule, output=(5,)))
        logits.append(torch.randn(len(parents) + 1, VOCAB, generator=generator) * 2)
    result = verify(trees, torch.cat(logits) if logits else torch.zeros(0, VOCAB), states)
    for index, (tree, own, rows) in enumerate(zip(trees, states, logits, strict=True)):
        expected = reference_verify.verify_one(tree, rows, own, accept_rule(tree, own))
        assert (result.token_ids[index], result.accepted_nodes[index]) == expected


def test_which_rule_applies() -> None:
    chain = DraftTree.chain((1, 2), torch.full((2, VOCAB), 1 / VOCAB))
    tree = replace(chain, parents=(ROOT, ROOT))
    sampling = SamplingParams()
    for rule in AcceptRule:
        assert accept_rule(chain, state(sampling, rule=rule)) is rule
        assert accept_rule(replace(chain, probs=None), state(sampling, rule=rule)) is AcceptRule.KEYED
        assert accept_rule(chain, state(sampling, rule=rule, is_seeded=True)) is AcceptRule.KEYED
        assert accept_rule(chain, state(GREEDY, rule=rule)) is AcceptRule.KEYED
        assert accept_rule(EMPTY_TREE, state(sampling, rule=rule)) is AcceptRule.KEYED
    assert accept_rule(tree, state(sampling, rule=AcceptRule.BLOCK)) is AcceptRule.RATIO


# --- greedy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", range(5))
def test_greedy_takes_the_right_prefix_and_recovers(num_right: int) -> None:
    right = (4, 7, 7, 2)
    draft = right[:num_right] + tuple(token + 1 for token in right[num_right:])
    result = verify([DraftTree.chain(draft)], rows_for(*right, 9), [state()])
    assert result.token_ids == ((*right, 9)[: num_right + 1],)
    assert result.accepted_nodes == (tuple(range(num_right)),)
    assert result.logprobs == ((),)


def test_greedy_walks_a_tree() -> None:
    #      4 - 5
    # root<
    #      7 - 8 , 9
    tree = DraftTree((4, 5, 7, 8, 9), (ROOT, 0, ROOT, 2, 2))
    result = verify([tree], rows_for(7, 0, 0, 9, 0, 3), [state()])
    assert result.token_ids == ((7, 9, 3),)
    assert result.accepted_nodes == ((2, 4),)


def test_penalties_advance_inside_a_block() -> None:
    params = replace(GREEDY, presence_penalty=1.0)
    logits = torch.zeros(4, VOCAB)
    logits[:, 5], logits[:, 6] = 1.5, 1.0  # 5 leads until it was said once
    chain = DraftTree.chain((5, 6, 5))
    assert verify([chain], logits, [state(params)]).token_ids == ((5, 6, 5, 5),)
    assert verify([chain], logits, [state(GREEDY)]).token_ids == ((5, 5),)


def test_min_tokens_advances_inside_a_block() -> None:
    params = replace(GREEDY, min_tokens=2)
    logits = torch.zeros(4, VOCAB)
    logits[:, 0], logits[:, 6] = 3.0, 1.0  # the end leads wherever it is allowed
    chain = DraftTree.chain((6, 6, 6))
    assert verify([chain], logits, [state(params)]).token_ids == ((6, 6, 0),)
    assert verify([chain], logits, [state(params, output=(6,))]).token_ids == ((6, 0),)


# --- the keyed rule: text does not depend on drafts ----------------------------------------------


class Text:
    """A target whose logits are a fixed function of the tokens so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        return (
            torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash((self.seed, tokens)) % 2**63)) * 2
        )

    def rows(self, tokens: tuple[int, ...], tree: DraftTree) -> torch.Tensor:
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append((*paths[1 + parent], token))
        return torch.stack([self.logits((*tokens, *path)) for path in paths])

    def plain(self, own: SamplingState, length: int) -> tuple[int, ...]:
        """Plain sampling, one token a step."""
        output: tuple[int, ...] = ()
        while len(output) < length:
            now = replace(own, output_token_ids=output)
            output += (choose(self.logits(output)[None], [LogitsRow(0, now)])[0],)
        return output


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_a_seeded_answer_is_the_same_under_every_draft(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    text = Text(seed)
    own = state(data.draw(any_params), seed=seed, is_seeded=True, rule=data.draw(st.sampled_from(AcceptRule)))
    expected = text.plain(own, 12)
    generator = torch.Generator().manual_seed(seed)
    output: tuple[int, ...] = ()
    num_accepted = 0
    while len(output) < 8:
        tree = sampled_tree(data.draw(shapes), generator)
        if data.draw(st.booleans()):  # a draft that is mostly right
            right = expected[len(output) : len(output) + 3]
            chain = DraftTree.chain((*right, data.draw(st.integers(0, VOCAB - 1))))
            tree = chain if data.draw(st.booleans()) else replace(tree, probs=None)
        now = replace(own, output_token_ids=output)
        result = verify([tree], text.rows(output, tree), [now])
        num_accepted += len(result.accepted_nodes[0])
        output += result.token_ids[0]
    assert output[:12] == expected[: len(output)]


def test_one_hot_drafts_never_change_the_text_even_unseeded() -> None:
    text = Text(5)
    own = state(SamplingParams(temperature=0.9), seed=77)
    expected = text.plain(own, 6)
    for draft in (expected[:5], (*expected[:2], 0, 1), (11, 11)):
        tree = DraftTree.chain(draft)
        result = verify([tree], text.rows((), tree), [own])
        assert result.token_ids[0] == expected[: len(result.token_ids[0])]
        assert len(result.accepted_nodes[0]) == sum(
            draft[: i + 1] == expected[: i + 1] for i in range(len(draft))
        )


# --- acceptance -------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_block_accepts_at_least_as_much_as_ratio(noise: float) -> None:
    generator = torch.Generator().manual_seed(11)
    num, depth = 3000, 4
    logits = torch.randn(num, depth + 1, VOCAB, generator=generator) * 1.5
    q = (logits[:, :depth] + noise * torch.randn(num, depth, VOCAB, generator=generator)).softmax(2)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(num, depth).tolist()
    trees = [DraftTree.chain(tuple(tokens), q[i]) for i, tokens in enumerate(drafts)]
    lengths = {
        rule: verify(
            trees, logits.flatten(0, 1), [state(SamplingParams(), seed=i, rule=rule) for i in range(num)]
        ).accepted_nodes
        for rule in (AcceptRule.RATIO, AcceptRule.BLOCK)
    }
    ratio, block = (torch.tensor([len(n) for n in lengths[rule]], dtype=torch.float64) for rule in lengths)
    gain = block - ratio
    assert gain.mean() >= -2 * gain.std() / math.sqrt(num)
    if noise == 0.0:  # a draft that is the target is always right
        assert ratio.min() == block.min() == depth
    else:
        assert 0 < ratio.mean() < depth


def test_a_draft_the_target_rules_out_is_never_accepted() -> None:
    params = SamplingParams(top_k=1)
    q = torch.full((2, VOCAB), 1 / VOCAB)
    trees = [DraftTree.chain((3, 4), q)] * 50
    logits = rows_for(5, 6, 7).repeat(50, 1)
    for rule in AcceptRule:
        result = verify(trees, logits, [state(params, seed=i, rule=rule) for i in range(50)])
        assert set(result.token_ids) == {(5,)}


# --- logprobs, faults -------------------------------------------------------------------------


def test_logprobs_come_from_the_rows_that_decided() -> None:
    tree = DraftTree((4, 5, 7, 8), (ROOT, 0, ROOT, 2))
    logits = rows_for(7, 0, 0, 8, 3) + torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) / 10
    states = [state(replace(GREEDY, num_logprobs=2, logit_bias={0: -100.0})), state(GREEDY)]
    result = verify([tree, EMPTY_TREE], torch.cat([logits, logits[:1]]), states)
    assert result.token_ids == ((7, 8, 3), (7,))
    assert [found.token_id for found in result.logprobs[0]] == [7, 8, 3]
    raw = logits.log_softmax(1)
    for found, row in zip(result.logprobs[0], (0, 3, 4), strict=True):
        assert found.logprob == pytest.approx(raw[row, found.token_id].item())
        assert len(found.top) == 2
    assert result.logprobs[1] == ()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
def test_nan_is_refused_and_the_sequence_named(params: SamplingParams) -> None:
    logits = torch.zeros(6, VOCAB)
    logits[2, 3] = math.nan
    with pytest.raises(InvalidLogits, match="NaN") as caught:
        verify([DraftTree.chain((0,))] * 3, logits, [state(params)] * 3)
    assert caught.value.sequence_index == 1


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 rows"):
        verify([DraftTree.chain((1, 2))], torch.zeros(2, VOCAB), [state()])


def test_nothing_to_verify() -> None:
    assert verify([], torch.zeros(0, VOCAB), []).token_ids == ()


def test_rounding_in_the_draft_never_leaves_the_vocabulary() -> None:
    """p equal to q but for rounding: the residual may be empty, and a token must still come out."""
    q = torch.full((1, VOCAB), 1 / VOCAB)
    for rule in (AcceptRule.RATIO, AcceptRule.BLOCK):
        trees = [DraftTree.chain((3,), q * (1 + 1e-6))] * 200
        states = [state(SamplingParams(), seed=i, rule=rule) for i in range(200)]
        result = verify(trees, torch.zeros(400, VOCAB), states)
        assert all(0 <= token < VOCAB for tokens in result.token_ids for token in tokens)


def test_sound_trees_have_no_faults() -> None:
    generator = torch.Generator().manual_seed(0)
    for parents in ((), (ROOT,), (ROOT, ROOT, 0, 0, 1)):
        tree = sampled_tree(parents, generator)
        trees = [tree, replace(tree, probs=None)]
        assert find_faults(trees, [5, 5], VOCAB, are_chains=False) == {}
        forked = {} if tree.is_chain else {0, 1}
        assert find_faults(trees, [5, 5], VOCAB, are_chains=True).keys() == set(forked)


def test_each_draft_is_blamed_for_its_own_faults() -> None:
    sound = DraftTree.chain((4, 5), torch.full((2, VOCAB), 1 / VOCAB))
    half = replace(sound, probs=torch.stack([torch.full((VOCAB,), 1 / VOCAB), torch.eye(VOCAB)[6]]))
    faults = find_faults([sound, half, sound, DraftTree.chain((1,) * 3)], [2] * 4, VOCAB, are_chains=True)
    assert {index: fault.message for index, fault in faults.items()} == {
        1: "token id 5 at node 1 has probability 0 under its own draft",
        3: "3 draft tokens where at most 2 were granted",
    }
