"""How many of a head's draft tokens the target would accept: by position, for greedy decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.training.batches import make_batch
from engine.training.corpus import Sample
from engine.training.head_module import DraftHeadModule
from engine.training.targets import TargetTables

NUM_POSITIONS = 5
_BATCH = 8


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Over every place of the answers where a draft could begin.

    `per_position[k]` is the share of drafts whose tokens 0 to k would all be accepted.
    """

    num_drafts: int
    per_position: tuple[float, ...]
    mean_acceptance_length: float  # at 3 draft tokens, bonus included
    by_label: dict[str, float] = field(default_factory=dict)  # the same by task


@torch.no_grad()
def measure_acceptance(
    module: DraftHeadModule,
    target: TargetTables,
    samples: Sequence[Sample],
    num_positions: int = NUM_POSITIONS,
) -> Acceptance:
    """Greedy chains against the target's own argmax, on greedy answers.

    The rounds run over the true text: as long as a chain is right that is what it drafted itself.
    """
    module.eval()
    hits: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(num_positions))
    counts: dict[str, int] = defaultdict(int)
    order = sorted(samples, key=lambda sample: len(sample.token_ids) - sample.first)
    for at in range(0, len(order), _BATCH):
        part = order[at : at + _BATCH]
        batch = make_batch(part, [0] * len(part)).to(target.device)
        rounds = module(
            target.embed_entries(batch.token_ids, module.num_input_tokens),
            batch.hidden[:, :-1],
            num_positions,
        )
        outputs = batch.is_output
        wanted = torch.full(outputs.shape, -1, device=target.device)
        wanted[outputs] = target.best_tokens(batch.hidden[:, 1:][outputs])
        is_right = outputs.clone()
        for index, result in enumerate(rounds):
            guess = torch.full(outputs.shape, -2, device=target.device)
            guess[outputs] = target.draft_token_ids[target.draft_logits(result[outputs]).argmax(-1)]
            # The draft that began at entry e has its k-th token at entry e + k.
            right_here = (guess == wanted).roll(-index, 1)
            if index:
                right_here[:, -index:] = False
            is_right = is_right & right_here
            for row, sample in enumerate(part):
                hits[sample.label][index] += int(is_right[row].sum())
        for row, sample in enumerate(part):
            counts[sample.label] += int(outputs[row].sum())
    num_drafts = sum(counts.values())
    survival = sum(hits.values(), torch.zeros(num_positions)) / max(num_drafts, 1)
    return Acceptance(
        num_drafts,
        tuple(round(float(share), 4) for share in survival),
        round(1.0 + float(survival[:3].sum()), 4),
        {
            label: round(1.0 + float(hits[label][:3].sum()) / max(counts[label], 1), 3)
            for label in sorted(hits)
        },
    )
