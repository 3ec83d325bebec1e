"""What speculation does to the whole batch: target steps saved against the time that drafts take.

Requests in one batch share their steps, so a slow drafter slows the baseline requests beside it as
much as its own, and the two compared with each other look alike. Here steps are looked at instead.
A decode step of `B` sequences in which drafts of one policy had `A` tokens accepted emits as much as
`(B + A) / B` steps without them would; what such a step takes is measured where steps without drafts
ran in the same second (of as many sequences, and as long ones), and else is at most what this one took
without its drafting, which flatters speculation.

Pure: every method is told the time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from engine.types import DraftWork, StepRecord
from specgate.config.guards import LatencyGuard
from specgate.policy.door import Reading

_SLICE_S = 1.0  # steps are summed over so long; slices differ from each other as much as the truth is unsure
_MIN_SLICES = 5
_MAX_SLICES = 600
_MIN_PLAIN = 3  # steps without drafts in a slice, before they stand for what one takes
_STEPS_A_PROBE = 10  # drafted steps that count as one sample while a door is probed
_SURE = 3.0  # standard errors
_Shape = tuple[int, int]  # sequences, and their KV length within a factor of two


@dataclass(slots=True)
class _Tally:
    """One policy in one slice. Seconds."""

    num_steps: int = 0
    took_s: float = 0.0  # its steps
    plain_s: float = 0.0  # steps without its drafts, for the same tokens
    alone_s: float = 0.0  # the same if all sequences had drafted, at no further cost


@dataclass(slots=True)
class _Slice:
    began_s: float
    took_s: float = 0.0  # all decode steps
    plain: dict[_Shape, list[float]] = field(default_factory=dict)
    drafted: list[StepRecord] = field(default_factory=list)
    tallies: dict[str, _Tally] = field(default_factory=dict)

    def close(self) -> None:
        """Nothing more comes: sum it up."""
        for record in self.drafted:
            num_accepted = sum(work.num_accepted_tokens for work in record.drafts)
            num_policies = sum(work.num_draft_tokens > 0 for work in record.drafts)
            plain = self.plain.get(_shape(record), [])
            for work in record.drafts:
                step_s = record.seconds - work.seconds
                if num_policies <= 1 and len(plain) >= _MIN_PLAIN:
                    step_s = sum(plain) / len(plain)
                self._count(record, work, step_s, num_accepted)
        self.drafted.clear()
        self.plain.clear()

    def _count(self, record: StepRecord, work: DraftWork, step_s: float, num_accepted: int) -> None:
        tally = self.tallies.setdefault(work.method, _Tally())
        num_others = record.num_decode_sequences + num_accepted - work.num_accepted_tokens
        tally.num_steps += 1
        tally.took_s += record.seconds
        tally.plain_s += step_s * (1 + work.num_accepted_tokens / num_others)
        tally.alone_s += step_s * (1 + work.num_accepted_tokens / max(work.num_sequences, 1))


class GainBook:
    """The pace of decoding with each policy's drafts, in times of the pace without them."""

    def __init__(self, config: LatencyGuard) -> None:
        self._config = config
        self._slices: deque[_Slice] = deque(maxlen=_MAX_SLICES)  # closed ones
        self._open: _Slice | None = None
        self._policies: set[str] = set()

    def add_step(self, record: StepRecord, now_s: float) -> None:
        """A step. Those with prompts in them say nothing clear."""
        if record.num_prefill_tokens or not record.num_decode_sequences:
            return
        if record.seconds <= 0:  # a clock that stood still
            return
        if self._open is None or not 0 <= now_s - self._open.began_s < _SLICE_S:
            self._close()
            self._open = _Slice(now_s)
        self._open.took_s += record.seconds
        if record.drafts:
            self._open.drafted.append(record)
            self._policies.update(work.method for work in record.drafts)
        if not any(work.num_draft_tokens for work in record.drafts):
            plain = self._open.plain.setdefault(_shape(record), [])
            plain.append(max(record.seconds - record.draft_s, 0.0))

    def policies(self) -> set[str]:
        """All that drafted."""
        return self._policies

    def reading(self, policy: str, now_s: float, since_s: float, probe_samples: int | None) -> Reading | None:
        """While allowed: the pace over all that was decoded, at most, so that neither chance nor a little
        exploration shuts it. While probed, `probe_samples` set: over its own steps, as if all had drafted,
        since the few that probe pay alone for what many would share."""
        while self._slices and self._slices[0].began_s < now_s - self._config.gain_window_s:
            self._slices.popleft()
        slices = [piece for piece in self._slices if piece.began_s >= since_s]
        tallies = [tally for piece in slices if (tally := piece.tallies.get(policy)) is not None]
        num_steps = sum(tally.num_steps for tally in tallies)
        if not num_steps:
            return None
        if probe_samples is not None:
            least = min(self._config.min_gain_steps, probe_samples * _STEPS_A_PROBE)
            value = sum(t.alone_s for t in tallies) / sum(t.took_s for t in tallies)
            return self._told(value, num_steps, least, "its drafts")
        least = self._config.min_gain_steps if len(slices) >= _MIN_SLICES else num_steps + 1
        return self._told(_at_most(slices, policy), num_steps, least, "its drafts, at most,")

    def _told(self, value: float, num_steps: int, least: int, with_what: str) -> Reading:
        what = f"the pace of decoding with {with_what}"
        unit, floor = "x that without", self._config.min_gain
        return Reading(value, floor, unit, num_steps, least, is_floor=True, what=what, kind="gain")

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._slices.append(self._open)
            self._open = None


def _at_most(slices: list[_Slice], policy: str) -> float:
    """Three standard errors above the estimate, from how far slices lie apart (ratio of sums)."""
    took_s = sum(piece.took_s for piece in slices)
    won = [
        tally.plain_s - tally.took_s if (tally := piece.tallies.get(policy)) is not None else 0.0
        for piece in slices
    ]
    gain = sum(won) / took_s
    apart = sum((won_s - gain * piece.took_s) ** 2 for won_s, piece in zip(won, slices, strict=True))
    num = len(slices)
    doubt = math.sqrt(apart * num / (num - 1)) / took_s if num > 1 else math.inf
    return 1 + gain + _SURE * doubt


def _shape(record: StepRecord) -> _Shape:
    return record.num_decode_sequences, max(record.num_kv_tokens, 1).bit_length()
