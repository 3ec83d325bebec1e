"""What the machine can do, and how close verify and whole steps come to that."""

from __future__ import annotations

import random
from array import array
from functools import partial

import torch
from report import Section
from sizes import Place

from engine.batch import BatchRow, build_batch
from engine.kernels.triton import verify as fused
from engine.kernels.triton.pack import pack
from engine.models.llama import CausalLM
from engine.replay import StepReplay
from engine.sampling_state import SamplingState
from engine.spec.randomness import RandomKey
from engine.spec.tree import DraftTree
from engine.spec.verify import accept_rule
from engine.spec.walk import start_walks
from engine.types import AcceptRule, SamplingParams

BLOCK_SIZE = 16


def copy_bandwidth(place: Place) -> float:
    """Bytes a second that a copy reads and writes, together."""
    num = 2**30 if place.is_cuda else 2**16
    source = torch.empty(num, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * num / place.seconds(lambda: target.copy_(source))


def product_rate(place: Place) -> float:
    """Multiplications and additions a second of a large bfloat16 product."""
    num = 8192 if place.is_cuda else 64
    a, b = torch.randn(2, num, num, device=place.device).bfloat16()
    return float(2 * num**3 / place.seconds(lambda: a @ b))


def measure_limits(place: Place, section: Section) -> None:
    """Copy bandwidth and product rate: what the floors below are made of."""
    bandwidth, rate = copy_bandwidth(place), product_rate(place)
    section.figure("copy, read and written", f"{bandwidth / 1e9:.0f} GB/s", bytes_per_second=bandwidth)
    section.figure("bfloat16 product", f"{rate / 1e12:.0f} TFLOP/s", flops=rate)


def measure_verify(place: Place, section: Section) -> None:
    """The verify kernels alone, logits out of cache, against reading them once at copy bandwidth."""
    bandwidth = copy_bandwidth(place)
    kinds = {
        "greedy": (SamplingParams(temperature=0.0), AcceptRule.KEYED, 1.3),
        "sampled": (SamplingParams(temperature=0.8), AcceptRule.KEYED, 3.0),
        "sampled, top_p and top_k": (
            SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
            AcceptRule.KEYED,
            3.0,
        ),
        "ratio, top_p": (SamplingParams(temperature=0.8, top_p=0.95), AcceptRule.RATIO, None),
        "block, top_p": (SamplingParams(temperature=0.8, top_p=0.95), AcceptRule.BLOCK, None),
    }
    flush = torch.empty(2**28 if place.is_cuda else 1024, dtype=torch.uint8, device=place.device)
    for name, (params, rule, limit) in kinds.items():
        for num_sequences in (1, 8, 64) if place.is_cuda else (1,):
            if section.is_late:
                return
            seconds, num_rows = _verify_seconds(place, params, rule, num_sequences, flush)
            once = num_rows * place.vocab_size * 4 / bandwidth
            rate = once / seconds * bandwidth
            text = f"{seconds * 1e6:8.0f} us, {rate / 1e9:6.0f} GB/s, {seconds / once:5.2f}x of one reading"
            figures = {"seconds": seconds, "times_one_reading": seconds / once, "num_rows": num_rows}
            label = f"{name}, {num_rows} rows"
            if limit is not None and num_sequences == 64:  # fewer rows are bound by launches
                section.check(label, seconds <= limit * once, f"{text} (at most {limit})", **figures)
            else:
                section.figure(label, text, **figures)


def _verify_seconds(
    place: Place, params: SamplingParams, rule: AcceptRule, num_sequences: int, flush: torch.Tensor
) -> tuple[float, int]:
    """Seconds on the device of one launch of all verify kernels, and the rows it judged."""
    num_draft, vocab = (8 if place.is_cuda else 2), place.vocab_size
    rng = random.Random(1)
    is_drawn = rule is not AcceptRule.KEYED
    logits = 2 * torch.randn(num_sequences * (1 + num_draft), vocab, device=place.device)
    trees, states = [], []
    for s in range(num_sequences):
        rows = logits[s * (1 + num_draft) :][:num_draft]
        probs = rows.softmax(1) if is_drawn else None
        tokens = torch.multinomial(rows.softmax(1), 1)[:, 0] if is_drawn else rows.argmax(1)
        trees.append(DraftTree.chain(tuple(tokens.tolist()), probs))
        key = RandomKey(rng.getrandbits(63))
        states.append(SamplingState(params, [5, 6, 7], [8], frozenset(), key, rule))
    walks = start_walks(trees, states)
    rules = [accept_rule(tree, state) for tree, state in zip(trees, states, strict=True)]
    tables = pack(walks, rules, vocab, place.device)
    draft = torch.cat([tree.probs for tree in trees if tree.probs is not None]) if is_drawn else logits
    launch = partial(fused.launch, tables, logits, draft)
    if not place.is_cuda:
        return place.seconds(launch), len(logits)
    # The launches of a graph, so that the device is timed and not the host; the cache is emptied first.
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def both() -> None:
        flush.zero_()
        graph.replay()

    return max(1e-9, place.seconds(both) - place.seconds(flush.zero_)), len(logits)


def measure_steps(place: Place, section: Section) -> None:
    """Replayed decode and verify steps by batch and window, against what the machine allows."""
    bandwidth, rate = copy_bandwidth(place), product_rate(place)
    for spec in place.models:
        model = place.model(spec, torch.bfloat16 if place.is_cuda else torch.float32)
        num_blocks = max(place.batches) * -(-(place.context + max(place.windows)) // BLOCK_SIZE)
        cache = model.new_cache(num_blocks + 1, BLOCK_SIZE)
        replay = StepReplay(model, cache, num_blocks, max(place.batches), is_captured=place.is_cuda)
        alone: dict[int, float] = {}
        for batch_size in place.batches:
            for window in place.windows:
                if section.is_late or batch_size * window > 512:
                    continue
                seconds = _step_seconds(place, model, replay, batch_size, window)
                floor = _floor_seconds(model, batch_size, window, place.context, bandwidth, rate)
                alone.setdefault(batch_size, seconds)
                section.figure(
                    f"{spec.name} batch {batch_size} window {window}",
                    f"{seconds * 1e3:7.3f} ms, {seconds / floor:5.2f}x of the floor, "
                    f"{seconds / alone[batch_size]:5.2f}x of window 1",
                    seconds=seconds,
                    floor_seconds=floor,
                    times_window_1=seconds / alone[batch_size],
                )
        del model, cache, replay
        place.tidy()


def _step_seconds(place: Place, model: CausalLM, replay: StepReplay, batch_size: int, window: int) -> float:
    per_sequence = -(-(place.context + window) // BLOCK_SIZE)
    rows = [
        BatchRow(
            [7] * window, place.context, array("i", range(s * per_sequence, (s + 1) * per_sequence)), window
        )
        for s in range(batch_size)
    ]
    batch = build_batch(rows, BLOCK_SIZE, place.device)

    def step() -> None:
        if replay.run(batch) is None:
            model.forward(batch, replay.cache)

    with torch.inference_mode():
        return place.seconds(step)


def _floor_seconds(
    model: CausalLM, batch_size: int, window: int, context: int, bandwidth: float, rate: float
) -> float:
    """The larger of reading weights and KV once and of the products' arithmetic."""
    spec = model.spec
    size = model.embedding.element_size()
    tables = spec.vocab_size * spec.hidden_size
    num_weights = spec.num_parameters - (0 if spec.is_tied else tables)  # of the embedding few rows are read
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context * batch_size
    # Reading alone is a little faster than the half of a copy; the copy's rate is the yardstick here.
    return max(size * (num_weights + kv) / bandwidth, 2 * num_weights * batch_size * window / rate)
