"""What drafters that go by the text alone would have done where they had no turn.

What an n-gram or a suffix drafts depends on nothing but the tokens so far, and verification never changes
which tokens come. So once they have come, it is known whether the draft would have been right, for the
price of looking it up: nothing is verified for it, and no probe is needed. That holds for sampled text as
well, in the mean: a token drawn from the target equals the draft as often as verification would have
accepted it (theory: an off-policy estimate whose every importance weight is 1).

Little of it is done in one step, so that a step takes no longer by more than some lookups.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import cast

from engine.drafting import Drafting
from engine.sequence import Sequence
from engine.spec.drafter import Drafter, KnowsInHindsight

_FEWEST, _MOST = 16, 16  # new tokens that are worth a look, and those of them that are looked at
_SHARE = 3  # the longer an answer is, the less is news in it: a look when a third of it is new


class Hindsight:
    """Looks back at one sequence after each step."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._drafters: Mapping[str, Drafter] = drafting.drafters
        self._knows: dict[type[Drafter], bool] = {}  # asking a type costs microseconds, every step
        self._num_looks = 0

    def look(self, sequences: Seq[Sequence]) -> None:
        """After a step of `sequences`. Those that nobody may choose for are left alone. One drafter a step,
        in turns: while others draft, none of them is in a hurry."""
        names = [name for name, drafter in self._drafters.items() if self._can(drafter)]
        if not names:
            return
        self._num_looks += 1
        name = names[self._num_looks % len(names)]
        for other in names:
            for seq in sequences:
                if seq.method == other:  # it has its turn: what it does is seen
                    seq.judged[other] = len(seq.token_ids)
        drafter = self._drafters[name]
        longest: Sequence | None = None
        depth, most = drafter.num_speculative_tokens, 0
        for seq in sequences:
            if seq.method == name:
                continue
            length = len(seq.token_ids)
            num_new = length - seq.judged.get(name, seq.prompt_length + 1)
            enough = max(_FEWEST + depth, (length - seq.prompt_length) // _SHARE)
            if num_new > most and num_new >= enough and seq.sampling is not None and not _is_fixed(seq):
                longest, most = seq, num_new
        if longest is not None:
            self._judge(name, cast("KnowsInHindsight", drafter), longest, depth)

    def _can(self, drafter: Drafter) -> bool:
        kind = type(drafter)
        if kind not in self._knows:
            self._knows[kind] = isinstance(drafter, KnowsInHindsight)
        return self._knows[kind]

    def _judge(self, name: str, drafter: KnowsInHindsight, seq: Sequence, depth: int) -> None:
        start = seq.judged.get(name, seq.prompt_length + 1)
        start = max(start, len(seq.token_ids) - depth - _MOST)  # what is left behind stays unknown
        told = self._drafting.look_back(name, drafter, seq, start, depth)
        if told is None:
            seq.judged[name] = len(seq.token_ids)
            return
        drafts, seq.judged[name] = told
        if drafts:
            seq.counters.judge(name, drafts, depth)


def _is_fixed(seq: Sequence) -> bool:
    policy = seq.request.policy
    return policy.is_exact or policy.is_pinned
