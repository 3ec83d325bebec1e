"""The fused verify against the rules as the papers state them (`engine.kernels.reference_verify`)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.errors import InvalidLogits
from engine.kernels import reference_verify
from engine.kernels.triton import verify as fused
from engine.sampling_state import SamplingState
from engine.spec.randomness import RandomKey
from engine.spec.tree import ROOT, DraftTree
from engine.spec.verify import accept_rule
from engine.spec.walk import start_walks
from engine.types import AcceptRule, SamplingParams

VOCAB = 97


@dataclass(frozen=True)
class Case:
    """A batch of drafts over one vocabulary."""

    trees: list[DraftTree]
    logits: torch.Tensor
    states: list[SamplingState]


def draw_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Any combination of processors, each absent half of the time."""

    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9, 0.99]), 1.0),
        top_k=maybe(rng.choice([1, 3, 20, vocab + 5]), 0),
        min_p=maybe(rng.choice([0.02, 0.3]), 0.0),
        repetition_penalty=maybe(rng.choice([1.3, 0.8]), 1.0),
        presence_penalty=maybe(rng.choice([0.7, -0.4]), 0.0),
        frequency_penalty=maybe(rng.choice([0.5, -0.2]), 0.0),
        logit_bias=maybe({rng.randrange(vocab): 3.0, rng.randrange(vocab): -100.0}, {}),
        min_tokens=maybe(rng.choice([2, 9]), 0),
        stop_token_ids=(rng.randrange(vocab),),
    )


def draw_tree(rng: random.Random, p: torch.Tensor, is_tree: bool, has_probs: bool) -> DraftTree:
    """Up to 6 nodes near what the target says, siblings without replacement."""
    num = rng.randrange(0, 7)
    vocab = p.shape[1]
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[torch.Tensor] = []
    for i in range(num):
        parent = rng.randrange(max(-1, i - 3), i) if is_tree else i - 1
        q = (p[1 + parent].double().log() + 0.7 * torch.randn(vocab, dtype=torch.float64)).softmax(0)
        siblings = [tokens[j] for j in range(i) if parents[j] == parent]
        if siblings:
            q = next(probs[j] for j in range(i) if parents[j] == parent).double()
        left = q.clone()
        left[siblings] = 0.0
        tokens.append(int(torch.multinomial(left, 1)) if has_probs else int((left * p[1 + parent]).argmax()))
        parents.append(parent)
        probs.append(q.float())
    return DraftTree(tuple(tokens), tuple(parents), torch.stack(probs) if has_probs and num else None)


def draw_case(seed: int, vocab: int = VOCAB, num_sequences: int = 3) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    trees, rows, states = [], [], []
    for _ in range(num_sequences):
        raw = rng.choice([1.0, 3.0]) * torch.randn(7, vocab)
        tree = draw_tree(rng, raw.softmax(1), rng.random() < 0.5, rng.random() < 0.6)
        params = draw_params(rng, vocab)
        trees.append(tree)
        rows.append(raw[: 1 + len(tree)])
        states.append(
            SamplingState(
                params=params,
                prompt_token_ids=[rng.randrange(vocab) for _ in range(5)],
                output_token_ids=[rng.randrange(vocab) for _ in range(rng.randrange(4))],
                eos_token_ids=frozenset({rng.randrange(vocab)}),
                key=RandomKey(rng.randrange(-(2**63), 2**64), is_seeded=rng.random() < 0.3),
                rule=rng.choice(list(AcceptRule)),
            )
        )
    return Case(trees, torch.cat(rows), states)


def run(case: Case, device: torch.device) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    walks = start_walks(case.trees, case.states)
    rules = [accept_rule(tree, state) for tree, state in zip(case.trees, case.states, strict=True)]
    logits = case.logits.to(device)
    before = logits.clone()
    fused.decide(walks, rules, logits)
    assert torch.equal(logits, before)  # penalties were undone
    return [(tuple(walk.token_ids), tuple(walk.nodes)) for walk in walks]


def expected(case: Case) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = 0
    for tree, state in zip(case.trees, case.states, strict=True):
        logits = case.logits[row : row + 1 + len(tree)]
        yield reference_verify.verify_one(tree, logits, state, accept_rule(tree, state))
        row += 1 + len(tree)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a row, also where the vocabulary is small."""
    monkeypatch.setattr(fused, "SCAN_TILE", 64)
    monkeypatch.setattr(fused, "_TILE", 64)
    monkeypatch.setattr(fused, "_SEARCH_TILE", 64)
    monkeypatch.setattr(fused, "_ENTRY_TILE", 16)
    monkeypatch.setattr(fused, "LIST_CAPACITY", 64)


@pytest.mark.parametrize("seed", range(5))
def test_equals_reference(seed: int, device: torch.device) -> None:
    case = draw_case(seed)
    assert run(case, device) == list(expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_equals_reference_on_more_cases(seed: int, device: torch.device) -> None:
    case = draw_case(seed, vocab=[5, 31, 97, 260][seed % 4], num_sequences=6)
    assert run(case, device) == list(expected(case))


@pytest.mark.parametrize("capacity", [1, 4096])
def test_a_short_list_of_candidates_changes_nothing(
    capacity: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(200, 201):
        case = draw_case(seed)
        monkeypatch.setattr(fused, "LIST_CAPACITY", capacity)
        assert run(case, device) == list(expected(case))


def one(logits: torch.Tensor, params: SamplingParams, seed: int = 3, tree: DraftTree | None = None) -> Case:
    key = RandomKey(seed, is_seeded=True)
    state = SamplingState(params, [1, 2], [3], frozenset({0}), key, AcceptRule.KEYED)
    return Case([tree or DraftTree()], logits, [state])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1e-4, top_p=0.9),
        SamplingParams(temperature=50.0, top_k=40),
    ],
)
def test_equal_scores_stay_by_lower_id(params: SamplingParams, device: torch.device) -> None:
    """Five tokens share the best score and the rest another one."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 20, 50, 70, 90]] = 1.0
    for seed in range(3):
        case = one(logits, params, seed)
        assert run(case, device) == list(expected(case))


def test_a_flat_row_under_a_wide_nucleus_widens_its_window(device: torch.device) -> None:
    """Most mass lies farther from the best token than the first window reaches."""
    logits = torch.full((1, 300), -10.0)
    logits[0, 17] = 0.0
    for seed in range(2):
        case = one(logits, SamplingParams(temperature=1.0, top_p=0.999), seed)
        assert run(case, device) == list(expected(case))


def test_greedy_takes_the_lowest_of_equals_across_pieces(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB)
    assert run(one(logits, SamplingParams(temperature=0.0)), device) == [((0,), ())]
    logits[0, [40, 80]] = 2.0
    assert run(one(logits, SamplingParams(temperature=0.0)), device) == [((40,), ())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_a_choice_names_its_sequence(
    temperature: float, value: float, device: torch.device
) -> None:
    params = SamplingParams(temperature=temperature)
    logits = torch.randn(3, VOCAB)
    logits[2, 60] = value
    key = RandomKey(1)
    states = [SamplingState(params, [1], [], frozenset(), key, AcceptRule.RATIO) for _ in range(2)]
    tree = DraftTree.chain((5,))
    case = Case([DraftTree(), tree], logits, states)
    with pytest.raises(InvalidLogits) as error:
        run(case, device)
    assert error.value.sequence_index == 1


def test_a_masked_row_names_its_sequence(device: torch.device) -> None:
    case = one(torch.full((1, VOCAB), -math.inf), SamplingParams(temperature=0.0))
    with pytest.raises(InvalidLogits):
        run(case, device)


def test_noise_is_that_of_the_cpu(device: torch.device) -> None:
    """Without filters and with flat logits the keyed token is the argmax of the noise alone."""
    for seed in (0, 5, -1, 2**64 - 1, 2**40 + 3):
        case = one(torch.zeros(1, 1000), SamplingParams(temperature=1.0), seed)
        state = case.states[0]
        noise = state.key.gumbel(state.root_position, 1000)
        assert run(case, device) == [((int(noise.argmax()),), ())]


def test_root_is_no_node() -> None:
    assert ROOT == -1  # the tables rely on it
