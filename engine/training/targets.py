"""What training needs of a target: its embedding, its head over the draft vocabulary, its spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from engine.models.llama import CausalLM
from engine.training.corpus import Sample, is_validation
from engine.training.head_module import embed_entries


def frequent_tokens(samples: Iterable[Sample], num_tokens: int, always: Iterable[int] = ()) -> list[int]:
    """The most frequent tokens of the answers, those of the prompts after them; ascending ids.

    `always` are in it whatever their number (end of sequence).
    """
    answers: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for sample in samples:
        answers.update(sample.token_ids[sample.prompt_length :].tolist())
        prompts.update(sample.token_ids[: sample.prompt_length].tolist())
    ranked = [*always, *(t for t, _ in answers.most_common()), *(t for t, _ in prompts.most_common())]
    return sorted(list(dict.fromkeys(ranked))[:num_tokens])


class TargetTables:
    """The target's fixed parts as training uses them, in float32 on the training device.

    `model` is the float32 target on the CPU, from whose last layers a head starts.
    """

    def __init__(self, model: CausalLM, draft_token_ids: Sequence[int], device: str = "cpu") -> None:
        """`draft_token_ids`: the draft vocabulary, ascending."""
        self.spec = model.spec
        self.model = model
        self.device = torch.device(device)
        self.draft_token_ids = torch.tensor(draft_token_ids, dtype=torch.int64, device=self.device)
        self._embedding = model.embedding.to(self.device)
        head: torch.Tensor = model.head.weight  # type: ignore[attr-defined]
        self._head = head.to(self.device)
        self._draft_head = self._head[self.draft_token_ids].clone()

    def embed_entries(self, token_ids: torch.Tensor, num_input_tokens: int) -> torch.Tensor:
        """[..., length + 1] -> [..., length, num_input_tokens * hidden_size]: what entries take in."""
        return embed_entries(self._embedding, token_ids, num_input_tokens)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, len(draft_token_ids)] float32."""
        return F.linear(hidden, self._draft_head).float()

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's argmax over its whole vocabulary, [rows] token ids."""
        return torch.cat([F.linear(part, self._head).argmax(-1) for part in torch.split(hidden.float(), 256)])

    def split(self, samples: Sequence[Sample], share: float) -> tuple[list[Sample], list[Sample]]:
        """Training and validation samples, apart by group; validation has greedy answers only."""
        training = [s for s in samples if not is_validation(s.group, share)]
        validation = [s for s in samples if is_validation(s.group, share) and s.temperature == 0.0]
        return training, validation
