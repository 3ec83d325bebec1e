"""Training a draft head on a corpus, with checkpoints it can go on from.

Loss: in each of `num_rounds` rounds (the head's own results fed back, as in drafting) the cross
entropy to the target's whole distribution over the draft vocabulary, and in the first round a
smooth L1 distance to the target's hidden state (EAGLE, arXiv:2401.15077; rounds as in EAGLE-3,
arXiv:2503.01840). Muon and AdamW (see `optimiser`); the rate rises over a warm-up, stays, and falls
linearly to the end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.models.draft_head import head_spec
from engine.training.acceptance import Acceptance, measure_acceptance
from engine.training.batches import Batch, training_batches
from engine.training.corpus import CorpusError, Sample
from engine.training.head_module import DraftHeadModule, initialise
from engine.training.optimiser import Optimiser, RunningMean
from engine.training.targets import TargetTables

_INIT_TOKENS = 4096  # of the corpus, to fit the first `fc` on
_INIT_SAMPLE_TOKENS = 512
_CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The recipe."""

    num_steps: int = 2000
    batch_tokens: int = 1024
    max_length: int = 320  # tokens of a text at a time
    num_rounds: int = 3
    round_weight: float = 0.8  # a round counts this much of the one before
    learning_rate: float = 5e-4
    warmup_steps: int = 40
    decay_share: float = 0.4  # of all steps, at the end
    weight_decay: float = 0.01
    hidden_weight: float = 0.2  # of the distance to the target's hidden states
    clip_norm: float = 1.0
    is_muon: bool = True  # for the matrices; False: AdamW for all
    mean_decay: float = 0.98  # of the running mean of the weights, which is what is validated and exported
    num_layers: int = 1
    num_input_tokens: int = 2  # embeddings an entry is made of: of the next token, and of this one
    validation_share: float = 0.1
    validation_samples: int = 120
    evaluate_every: int = 200
    checkpoint_s: float = 120.0
    patience: int = 6  # evaluations without a better one before training ends; 0: never
    is_bfloat16: bool = False  # products in bfloat16, sums in float32
    seed: int = 0


@dataclass(slots=True)
class TrainState:
    """Where training stands, but for weights and optimiser."""

    step: int = 0
    best: float = 0.0
    num_worse: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Reported about every ten steps; `acceptance` only after an evaluation."""

    step: int
    num_steps: int
    loss: float
    seconds: float
    eta_s: float
    acceptance: Acceptance | None = None


Report = Callable[[TrainProgress], None]


class Trainer:
    """One training run in a folder. Built anew from the same arguments it goes on where it was."""

    def __init__(
        self,
        target: TargetTables,
        samples: Sequence[Sample],
        folder: Path,
        config: TrainConfig,
        clock: Callable[[], float],
    ) -> None:
        """Raises CorpusError where there is nothing to train or to validate on."""
        self.target = target
        self.config = config
        self.folder = folder
        self._clock = clock
        self.training, self.validation = target.split(samples, config.validation_share)
        if not self.training or not self.validation:
            raise CorpusError(
                f"{len(self.training)} samples to train on and {len(self.validation)} to validate on are"
                " too few; collect more prompts"
            )
        torch.manual_seed(config.seed)
        self.module = DraftHeadModule(
            head_spec(target.spec, config.num_layers), config.num_input_tokens
        ).to(target.device)
        self.optimiser = Optimiser(
            self.module,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            is_muon=config.is_muon,
        )
        self.mean = RunningMean(self.module, config.mean_decay)
        self.state = TrainState()
        if not self._load():
            self._initialise()

    def start_from(self, weights: dict[str, torch.Tensor]) -> None:
        """Begin with another head's weights; one that reads fewer tokens' embeddings grows to this one's.

        Raises RuntimeError where the shapes differ.
        """
        own = self.module.fc.weight
        given = weights["fc.weight"].float()
        if given.shape[1] < own.shape[1]:
            size = self.module.spec.hidden_size
            grown = torch.zeros_like(own)
            grown[:, :size], grown[:, -size:] = given[:, :size], given[:, -size:]
            given = grown
        self.module.load_state_dict({name: w.float() for name, w in weights.items()} | {"fc.weight": given})
        self.mean.module.load_state_dict(self.module.state_dict())

    def run(self, report: Report | None = None) -> Acceptance:
        """Train to the end or to the early stop; the best validation acceptance."""
        started_s, first_step, saved_s = self._clock(), self.state.step, self._clock()
        batches = self._batches()
        while self.state.step < self.config.num_steps:
            loss = self._train_step(next(batches))
            self.state.step += 1
            step, now_s = self.state.step, self._clock()
            is_last = step == self.config.num_steps
            acceptance = self.evaluate() if step % self.config.evaluate_every == 0 or is_last else None
            if report is not None and (step % 10 == 0 or acceptance is not None):
                seconds = now_s - started_s
                eta_s = seconds / (step - first_step) * (self.config.num_steps - step)
                report(TrainProgress(step, self.config.num_steps, loss, seconds, eta_s, acceptance))
            if acceptance is not None and self._is_over(acceptance):
                break
            if acceptance is not None or now_s - saved_s > self.config.checkpoint_s:
                self._save()
                saved_s = now_s
        self._save()
        return self.best()

    def evaluate(self) -> Acceptance:
        """Acceptance by position on the validation samples, of the weights' running mean."""
        samples = self.validation[: self.config.validation_samples]
        return measure_acceptance(self.mean.module, self.target, samples)

    def best(self) -> Acceptance:
        """Load into `mean` the weights that were best on the validation samples; their acceptance."""
        path = self.folder / "best.pt"
        if path.is_file():
            weights = torch.load(path, map_location=self.target.device, weights_only=True)
            self.mean.module.load_state_dict(weights)
        return self.evaluate()

    def _is_over(self, acceptance: Acceptance) -> bool:
        """Note an evaluation; True after `patience` of them brought nothing."""
        length = acceptance.mean_acceptance_length
        self.state.history.append({"step": self.state.step, **asdict(acceptance)})
        if length > self.state.best:
            self.state.best, self.state.num_worse = length, 0
            _write(self.mean.module.state_dict(), self.folder / "best.pt")
        else:
            self.state.num_worse += 1
        return bool(self.config.patience) and self.state.num_worse >= self.config.patience

    def _train_step(self, batch: Batch) -> float:
        self.module.train()
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.config.is_bfloat16):
            loss = self._loss(batch)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
        self.optimiser.step(rate(self.state.step, self.config))
        self.mean.update(self.module)
        return float(loss.detach())

    def _loss(self, batch: Batch) -> torch.Tensor:
        config, wanted = self.config, batch.hidden[:, 1:]
        embedded = self.target.embed_entries(batch.token_ids, config.num_input_tokens)
        rounds = self.module(embedded, batch.hidden[:, :-1], config.num_rounds)
        with torch.no_grad():
            outputs = batch.is_output
            probs = self.target.draft_logits(wanted[outputs]).softmax(-1)
        distance = F.smooth_l1_loss(rounds[0], wanted, reduction="none").mean(-1)
        loss = config.hidden_weight * distance[batch.is_entry].mean()
        weights = [config.round_weight**index for index in range(config.num_rounds)]
        for index, (result, weight) in enumerate(zip(rounds, weights, strict=True)):
            # Round k drafts the k-th token, so the first k - 1 output entries have no draft to be part of.
            is_drafted = outputs & outputs.roll(index, 1) if index else outputs
            if index:
                is_drafted[:, :index] = False
            scores = self.target.draft_logits(result[is_drafted]).log_softmax(-1)
            entropy = -(probs[is_drafted[outputs]] * scores).sum(-1).mean()
            loss = loss + entropy * (weight / sum(weights))
        return loss

    def _batches(self) -> Iterator[Batch]:
        """Without end; the order is a function of seed and step, so that a resumed run goes on alike."""
        epoch = self.state.step
        while True:
            dice = random.Random(self.config.seed * 1_000_003 + epoch)
            for batch in training_batches(
                self.training, self.config.batch_tokens, self.config.max_length, dice
            ):
                epoch += 1
                if batch.num_outputs:
                    yield batch.to(self.target.device)

    def _initialise(self) -> None:
        texts, hidden, num_tokens = [], [], 0
        for sample in self.training:
            if sample.first == 0:
                texts.append(sample.token_ids[:_INIT_SAMPLE_TOKENS])
                hidden.append(sample.hidden[:_INIT_SAMPLE_TOKENS])
                num_tokens += len(texts[-1])
            if num_tokens >= _INIT_TOKENS:
                break
        if texts:
            initialise(self.module, self.target.model, texts, hidden)
            self.mean.module.load_state_dict(self.module.state_dict())

    def _load(self) -> bool:
        """Go on from the folder's checkpoint; False where there is none."""
        path = self.folder / _CHECKPOINT
        if not path.is_file():
            return False
        saved = torch.load(path, map_location=self.target.device, weights_only=True)
        self.module.load_state_dict(saved["module"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.mean.load_state_dict(saved["mean"])
        self.state = replace(TrainState(), **saved["state"])
        return True

    def _save(self) -> None:
        saved = {
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "mean": self.mean.state_dict(),
            "state": asdict(self.state),
        }
        _write(saved, self.folder / _CHECKPOINT)


def rate(step: int, config: TrainConfig) -> float:
    """The share of the learning rate that holds at a step."""
    decay_steps = max(1, math.ceil(config.num_steps * config.decay_share))
    rising = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    falling = (config.num_steps - step) / decay_steps
    return max(0.0, min(1.0, rising, falling))


def _write(saved: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(saved, unfinished)
    unfinished.replace(path)
