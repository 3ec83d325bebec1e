"""Every kernel against the readable reference, on the device's own arithmetic."""

from __future__ import annotations

import random

import torch
from report import Section
from sizes import Place

from engine.batch import ForwardBatch
from engine.kernels import reference, reference_verify
from engine.kernels.triton import attention, compact, ngram, rotary, rows
from engine.kernels.triton import verify as fused
from engine.kernels.triton.launch import is_interpreted
from engine.sampling_state import SamplingState
from engine.spec.ngram import NgramIndex
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree
from engine.spec.verify import accept_rule
from engine.spec.walk import start_walks
from engine.types import AcceptRule, SamplingParams

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def ragged_batch(
    lens: list[tuple[int, int]], block_size: int, rng: random.Random, device: torch.device, is_tree: bool
) -> tuple[ForwardBatch, int]:
    """A batch of (cached, new) tokens over shuffled blocks, and the number of blocks."""
    counts = [-(-(old + new) // block_size) for old, new in lens]
    blocks = list(range(sum(counts)))
    rng.shuffle(blocks)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    visible: list[int] = []
    for s, (old, new) in enumerate(lens):
        mine = [blocks.pop() for _ in range(counts[s])]
        tables[s, : counts[s]] = torch.tensor(mine)
        seen: list[int] = []
        depth: list[int] = []
        for i in range(new):
            parent = rng.randrange(max(0, i - 3), i) if i else None
            seen.append((0 if parent is None else seen[parent]) | 1 << i)
            depth.append(0 if parent is None else depth[parent] + 1)
            slots.append(mine[(old + i) // block_size] * block_size + (old + i) % block_size)
            positions.append(old + (depth[i] if is_tree and new < 64 else i))
            visible.append(seen[i] if is_tree and new < 64 else 0)
    new_lens = torch.tensor([new for _, new in lens])
    start = torch.cat((torch.zeros(1, dtype=torch.int64), new_lens.cumsum(0))).int()
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        query_start=start.to(device),
        context_lens=torch.tensor([old + new for old, new in lens], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_rows=torch.zeros(0, dtype=torch.int64, device=device),
        visible=torch.tensor(visible, device=device) if is_tree else None,
        max_new_tokens=max(new for _, new in lens),
        max_context=max(old + new for old, new in lens),
    )
    return batch, sum(counts)


def _compare(
    section: Section, name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype
) -> None:
    error = float((got.float() - expected.float()).abs().max()) if got.numel() else 0.0
    scale = max(1.0, float(expected.float().abs().max())) if got.numel() else 1.0
    section.check(
        f"{name} {str(dtype).removeprefix('torch.')}",
        error <= TOLERANCE[dtype] * scale,
        f"largest error {error:.2e}",
        error=error,
    )


def check_kernels(place: Place, section: Section) -> None:
    """Attention, rotary, norms, SiLU, compaction, n-gram match."""
    for dtype in TOLERANCE:
        _attention(place, section, dtype)
        _layer(place, section, dtype)
    _compaction(place, section)
    _ngrams(place, section)


def _attention(place: Place, section: Section, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    shapes = [(32, 8, 64), (32, 8, 128)] if place.is_cuda else [(4, 2, 16)]
    long = 5000 if place.is_cuda else 40
    kinds = {
        "decode": [(long, 1), (17, 1), (0, 1), (900 % long, 1)],
        "window": [(long, 8), (33, 5), (long // 2, 8)],
        "mixed": [(long, 1), (0, 150 if place.is_cuda else 20), (20, 8)],
    }
    for num_heads, num_kv_heads, head_dim in shapes:
        for kind, lens in kinds.items():
            for is_tree in (False, True) if kind == "window" else (False,):
                batch, num_blocks = ragged_batch(lens, 16, rng, place.device, is_tree)
                keys, values = (
                    torch.randn(num_blocks, num_kv_heads, 16, head_dim, device=place.device).to(dtype)
                    for _ in range(2)
                )
                query = torch.randn(len(batch.slots), num_heads, head_dim, device=place.device).to(dtype)
                got = attention.paged_attention(query, keys, values, batch, head_dim**-0.5)
                expected = reference.paged_attention(query, keys, values, batch, head_dim**-0.5)
                tree = " tree" if is_tree else ""
                _compare(section, f"attention {kind}{tree} d{head_dim}", got, expected, dtype)


def _layer(place: Place, section: Section, dtype: torch.dtype) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = (33, 32, 8, 128) if place.is_cuda else (3, 4, 2, 16)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=place.device).to(dtype)
    angle = 100 * torch.rand(num_tokens, 1, head_dim, device=place.device)
    norms = torch.randn(2, head_dim, device=place.device).to(dtype)
    slots = torch.randperm(4 * num_tokens)[:num_tokens].to(place.device)
    shape = (-(-4 * num_tokens // 16), num_kv_heads, 16, head_dim)
    for own in (None, (norms[0], norms[1])):
        caches = [torch.zeros(2, *shape, device=place.device, dtype=dtype) for _ in range(2)]
        angles = (angle.cos(), angle.sin())
        expected = reference.rotate_and_write(heads, angles, own, 1e-5, (caches[0][0], caches[0][1]), slots)
        got = rotary.rotate_and_write(heads.clone(), angles, own, 1e-5, (caches[1][0], caches[1][1]), slots)
        name = "rotary" if own is None else "rotary with head norms"
        _compare(section, name, got, expected, dtype)
        _compare(section, f"{name}: cache", caches[1], caches[0], dtype)
    features = 4096 if place.is_cuda else 48
    x, delta = torch.randn(2, num_tokens, features, device=place.device).to(dtype)
    weight = torch.randn(features, device=place.device).to(dtype)
    for added in (None, delta):
        expected_sum, expected = reference.add_rms_norm(x, added, weight, 1e-5)
        got_sum, got = rows.add_rms_norm(x.clone(), added, weight, 1e-5)
        _compare(section, f"norm{'' if added is None else ' after residual'}", got, expected, dtype)
        if dtype is torch.bfloat16 and is_interpreted():  # which cuts bfloat16 off instead of rounding
            _compare(section, "residual sum", got_sum, expected_sum, dtype)
        else:
            section.check("residual sum is exact", torch.equal(got_sum, expected_sum))
    gate_up = torch.randn(num_tokens, 2 * features, device=place.device).to(dtype)
    _compare(section, "SiLU and gate", rows.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)


def _compaction(place: Place, section: Section) -> None:
    key, value = torch.randn(2, 3, 8, 2, 16, 64, device=place.device)
    source = torch.tensor([[5, 7, 9, 10], [65, 66, 70, -1], [-1] * 4], device=place.device)
    target = torch.tensor([[4, 5, 6, 7], [64, 65, 66, 0], [0] * 4], device=place.device)
    expected = key.clone(), value.clone()
    reference.compact_kv(*expected, source, target)
    compact.compact_kv(key, value, source, target)
    section.check("compaction", torch.equal(key, expected[0]) and torch.equal(value, expected[1]))


def _ngrams(place: Place, section: Section) -> None:
    rng = random.Random(2)
    length = 3000 if place.is_cuda else 50
    histories = [[rng.randrange(9) for _ in range(rng.randrange(1, length))] for _ in range(6)]
    padded = torch.zeros(len(histories), length, dtype=torch.int32)
    for row, tokens in zip(padded, histories, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    lengths = torch.tensor([len(tokens) for tokens in histories], dtype=torch.int32)
    got = ngram.match_ngrams(padded.to(place.device), lengths.to(place.device), 4, 2, 5).tolist()
    is_well = True
    for tokens, (num, *draft) in zip(histories, got, strict=True):
        index = NgramIndex(2, 5)
        index.extend(tokens)
        start = index.find(tokens)
        is_well &= draft[:num] == ([] if start is None else tokens[start : start + 4])
    section.check("n-gram match", is_well)


def check_verify(place: Place, section: Section) -> None:
    """Tokens decided on the device against the rules in float64; noise against the CPU's."""
    vocab = place.vocab_size
    rng = random.Random(4)
    torch.manual_seed(4)
    settings = {
        "greedy": SamplingParams(temperature=0.0),
        "greedy with penalties": SamplingParams(
            temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3
        ),
        "sampled": SamplingParams(temperature=0.8),
        "top_p": SamplingParams(temperature=0.8, top_p=0.9),
        "top_k": SamplingParams(temperature=1.0, top_k=40),
        "top_k, top_p, min_p": SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.02),
    }
    for name, params in settings.items():
        for rule in [AcceptRule.KEYED] if params.is_greedy else list(AcceptRule):
            num_wrong = 0
            num = 6 if place.is_cuda else 1
            for _ in range(num):
                num_wrong += not _is_equal(place, params, rule, vocab, rng)
            section.check(f"{name}, {rule.value}", num_wrong == 0, f"{num - num_wrong} of {num} drafts equal")
    state = RandomKey(rng.getrandbits(64), is_seeded=True)
    section.check("noise", _has_same_noise(place, state, vocab), "device argmax of the CPU's noise")
    section.figure("kernels", "interpreted" if is_interpreted() else "compiled")


def _is_equal(place: Place, params: SamplingParams, rule: AcceptRule, vocab: int, rng: random.Random) -> bool:
    num = 4 if place.is_cuda else 2
    logits = 3 * torch.randn(num + 1, vocab)
    probs = (logits[:num] + torch.randn(num, vocab)).softmax(1)
    is_drawn = rule is not AcceptRule.KEYED
    tokens = torch.multinomial(probs, 1)[:, 0] if is_drawn else logits[:num].argmax(1)
    tree = DraftTree.chain(tuple(tokens.tolist()), probs if is_drawn else None)
    state = SamplingState(
        params,
        [rng.randrange(vocab) for _ in range(9)],
        [1, 2],
        frozenset(),
        RandomKey(rng.getrandbits(63)),
        rule,
    )
    walks = start_walks([tree], [state])
    applied = accept_rule(tree, state)
    fused.decide(walks, [applied], logits.to(place.device))
    expected = reference_verify.verify_one(tree, logits, state, applied)
    return (tuple(walks[0].token_ids), tuple(walks[0].nodes)) == expected


def _has_same_noise(place: Place, key: RandomKey, vocab: int) -> bool:
    state = SamplingState(SamplingParams(temperature=1.0), [1] * 7, [], frozenset(), key, AcceptRule.KEYED)
    walks = start_walks([DraftTree()], [state])
    fused.decide(walks, [AcceptRule.KEYED], torch.zeros(1, vocab, device=place.device))
    return walks[0].token_ids == [int(key.gumbel(7, vocab).argmax())]
