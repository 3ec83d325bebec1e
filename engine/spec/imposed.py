"""Acceptance imposed: drafts that are right with a given probability per position.

For benches and calibration only: it separates what speculation costs from how good a drafter is.
The truth is known beforehand, so the speed-up is no drafter's merit; verification and the emitted
text are as with any other drafter.

`ImposedDrafter` costs nothing and asks an oracle. `ImposedDraftModel` and `ImposedDraftHead` pay for
a real drafter's forwards and replace only what they say; their truth is each prompt's answer as it
once was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.config import DraftModelConfig
from engine.models.draft_head import DraftHead
from engine.models.interface import GreedyChains, LanguageModel
from engine.models.spec import ModelSpec
from engine.spec.draft_model import DraftModelDrafter
from engine.spec.drafter import DraftContext
from engine.spec.head_drafter import DraftHeadDrafter
from engine.spec.randomness import RandomKey
from engine.spec.stub import Oracle
from engine.spec.tree import EMPTY_TREE, DraftTree

if TYPE_CHECKING:

    class _Base:
        """What `_Imposing` finds in the drafter that it is mixed into."""

        def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]: ...
        def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None: ...
        def end(self, seq_id: str) -> None: ...
        def _draw(self, jobs: Sequence[Any], logits: torch.Tensor) -> None: ...

else:
    _Base = object

_IMPOSED_SALT = 0xFFFFFFFF  # no root position is as large
_MAX_ANSWERS = 20_000


def check_acceptance(acceptance: Sequence[float]) -> tuple[float, ...]:
    """The chances as a tuple. Raises ValueError unless there is one and all are probabilities."""
    if not acceptance or not all(0.0 <= chance <= 1.0 for chance in acceptance):
        raise ValueError(f"acceptance is {tuple(acceptance)}; give probabilities between 0 and 1")
    return tuple(acceptance)


def impose(
    truth: Sequence[int], context: DraftContext, acceptance: Sequence[float], vocab_size: int
) -> list[int]:
    """`truth`, wrong from the first position on whose draw says so.

    Draft token j is right with probability `acceptance[j]` given that those before were; past the
    end its last value holds. The draws are keyed by (seed, prompt, position of the draft), so a run
    repeats, and greedy requests, which share a seed, do not share their errors.
    """
    tokens = list(truth[: context.max_draft_tokens])
    asked = hash(tuple(context.token_ids[: context.prompt_length]))  # of integers: the same in every process
    # Noise of its own: verification must not share it.
    key = RandomKey(context.generator.seed ^ asked, salt=_IMPOSED_SALT)
    for j, number in enumerate(key.uniform(len(context.token_ids), len(tokens)).tolist()):
        if number >= acceptance[min(j, len(acceptance) - 1)]:
            tokens[j:] = [(token + 1) % vocab_size for token in tokens[j:]]
            break
    return tokens


class ImposedDrafter:
    """Draws on an oracle and costs nothing. Where the oracle knows nothing the draft is empty."""

    def __init__(
        self,
        oracle: Oracle,
        vocab_size: int,
        acceptance: Sequence[float],
        *,
        name: str = "imposed",
        num_speculative_tokens: int = 4,
    ) -> None:
        self.name = name
        self.num_speculative_tokens = num_speculative_tokens
        self._oracle = oracle
        self._vocab_size = vocab_size
        self._acceptance = check_acceptance(acceptance)

    def begin(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """Holds nothing."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One chain per context."""
        return [self._propose_one(context) for context in contexts]

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if context.max_draft_tokens <= 0 or len(context.token_ids) == 0:
            return EMPTY_TREE
        return DraftTree.chain(
            tuple(impose(self._oracle(context), context, self._acceptance, self._vocab_size))
        )

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Holds nothing."""

    def end(self, seq_id: str) -> None:
        """Holds nothing."""

    def work(self) -> tuple[int, int]:
        """No forwards, no KV."""
        return 0, 0


class Truth(Protocol):
    """Who knows what the target will say next."""

    def truth(self, context: DraftContext) -> Sequence[int]:
        """The tokens known to follow, as many as are known; none is fine."""
        ...

    def observe(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """More of a running answer."""
        ...

    def end(self, seq_id: str) -> None:
        """An answer is over, or was cut short."""
        ...


_Question = tuple[tuple[int, ...], int, float]
"""What decides an answer: prompt, seed, temperature."""


@dataclass(slots=True)
class _Open:
    """A running sequence: what it was asked, and its output so far."""

    question: _Question
    output: list[int] = field(default_factory=list)


class Answers:
    """The truth as remembered: what followed each prompt, once it was answered without a draft.

    Greedy and seeded answers only: the others do not repeat.
    """

    def __init__(self) -> None:
        self._known: dict[_Question, tuple[int, ...]] = {}
        self._open: dict[str, _Open] = {}

    def truth(self, context: DraftContext) -> Sequence[int]:
        """The tokens to come; empty where the prompt is new or its answer went another way."""
        if context.temperature > 0 and not context.generator.is_seeded:
            return ()
        output = list(context.token_ids[context.prompt_length :])
        running = self._open.get(context.seq_id)
        if running is None:
            prompt = tuple(context.token_ids[: context.prompt_length])
            running = _Open((prompt, context.generator.seed, context.temperature))
            self._open[context.seq_id] = running
        running.output = output
        known = self._known.get(running.question, ())
        return known[len(output) :] if known[: len(output)] == tuple(output) else ()

    def observe(self, seq_id: str, token_ids: Sequence[int]) -> None:
        """More of a running answer."""
        if (running := self._open.get(seq_id)) is not None:
            running.output += token_ids

    def end(self, seq_id: str) -> None:
        """The longest answer is kept."""
        running = self._open.pop(seq_id, None)
        if running is None or len(running.output) < len(self._known.get(running.question, ())):
            return
        if len(self._known) >= _MAX_ANSWERS:
            del self._known[next(iter(self._known))]
        self._known[running.question] = tuple(running.output)


class _Imposing(_Base):
    """Makes a drafter's forwards run at their true cost and replaces its tokens.

    The first time a prompt is asked it drafts nothing and listens; from then on its drafts of
    that prompt are right as often as imposed. Its cache holds the imposed tokens, so that what it
    computes next is what a drafter that was right as often would have to compute.
    """

    _acceptance: tuple[float, ...]
    _imposed_vocab_size: int
    _answers: Truth
    _planned: dict[str, list[int]]

    def _impose(self, acceptance: Sequence[float], vocab_size: int, answers: Truth | None) -> None:
        """`answers` None: those it has heard itself."""
        self._acceptance = tuple(check_acceptance(acceptance))
        self._imposed_vocab_size = vocab_size
        self._answers = Answers() if answers is None else answers
        self._planned = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """As the drafter, at most as far as the answer is known."""
        granted = []
        for context in contexts:
            truth = self._answers.truth(context) if context.max_draft_tokens > 0 else ()
            planned = impose(truth, context, self._acceptance, self._imposed_vocab_size)
            self._planned[context.seq_id] = planned
            granted.append(replace(context, max_draft_tokens=len(planned)))
        return super().propose(granted)

    def observe(self, seq_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
        """Listen."""
        self._answers.observe(seq_id, token_ids)
        super().observe(seq_id, token_ids, num_accepted)

    def end(self, seq_id: str) -> None:
        """Remember the answer, forget the sequence."""
        self._answers.end(seq_id)
        self._planned.pop(seq_id, None)
        super().end(seq_id)

    def _draw(self, jobs: Sequence[Any], logits: torch.Tensor) -> None:
        """Draw as ever, for its cost, and put the imposed token in the drawn one's place."""
        super()._draw(jobs, logits)
        for job in jobs:
            job.token_ids[-1] = self._planned[job.context.seq_id][len(job.token_ids) - 1]
            job.probs.clear()  # what is imposed was drawn from no distribution


class ImposedDraftModel(_Imposing, DraftModelDrafter):
    """A draft model with imposed acceptance."""

    def __init__(
        self,
        model: LanguageModel,
        target: ModelSpec,
        config: DraftModelConfig,
        acceptance: Sequence[float],
        *,
        num_blocks: int,
        block_size: int,
        answers: Truth | None = None,
    ) -> None:
        """`answers` None: those it has heard itself."""
        super().__init__(model, target, config, num_blocks=num_blocks, block_size=block_size)
        self._impose(acceptance, target.vocab_size, answers)


class ImposedDraftHead(_Imposing, DraftHeadDrafter):
    """A draft head with imposed acceptance."""

    def __init__(
        self,
        head: DraftHead,
        config: DraftModelConfig,
        acceptance: Sequence[float],
        *,
        num_blocks: int,
        block_size: int,
        answers: Truth | None = None,
    ) -> None:
        """`answers` None: those it has heard itself."""
        super().__init__(head, config, num_blocks=num_blocks, block_size=block_size)
        self._impose(acceptance, head.spec.vocab_size, answers)

    def _propose_chains(
        self, chains: GreedyChains, jobs: Sequence[Any], trees: list[DraftTree]
    ) -> list[DraftTree]:
        """Drafts as ever, for their cost, and puts the imposed tokens in their place."""
        trees = super()._propose_chains(chains, jobs, trees)
        for job in jobs:
            planned = self._planned[job.context.seq_id][: len(trees[job.index].token_ids)]
            trees[job.index] = DraftTree.chain(tuple(planned))
        return trees
