"""The guard on what drafts do to all that is decoded beside them, on engines with scripted costs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from engine.types import DraftWork, StepRecord
from specgate.config.guards import AcceptanceGuard, DoorTiming, GuardsConfig
from specgate.policy.door import DoorState
from specgate.policy.guard_readings import NoCosts
from specgate.policy.guards import Change, Conditions, GuardPanel, Limits
from specgate.policy.reasons import Reason
from specgate.types import LoadView

# The acceptance floor would have its own opinion.
CONFIG = GuardsConfig(
    timing=DoorTiming(cooldown_s=5, probe_samples=3), acceptance=AcceptanceGuard(mode="off")
)
DOOR = (Reason.LATENCY_GUARD, "draft", None)
DEPTH = 4


@dataclass
class Engine:
    """Steps of `batch` sequences, of which `num_drafting` draft in a `share` of the steps. Seconds."""

    batch: int = 4
    num_drafting: int = 4
    acceptance: float = 0.8  # of each draft token, given those before it
    draft_s: float = 0.004
    verify_s: float = 0.002  # what checking drafts adds to a step
    share: float = 1.0
    plain_s: float = 0.020
    now_s: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def gain(self) -> float:
        """Pace with the drafts of one step in times of that without."""
        accepted = sum(self.acceptance**j for j in range(1, DEPTH + 1))
        took_s = self.plain_s + self.draft_s + self.verify_s
        return (1 + accepted * self.num_drafting / self.batch) * self.plain_s / took_s

    def steps(self, seconds: float) -> Iterator[StepRecord]:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            yield self._step(self.rng.random() < self.share)

    def _step(self, is_drafted: bool) -> StepRecord:
        took_s = self.plain_s * self.rng.lognormvariate(0, 0.1)
        drafts: tuple[DraftWork, ...] = ()
        if is_drafted:
            took_s += self.draft_s + self.verify_s
            num = self.num_drafting * DEPTH
            accepted = sum(self._accepted() for _ in range(self.num_drafting))
            drafts = (DraftWork("draft", DEPTH, self.num_drafting, num, accepted, seconds=self.draft_s),)
        self.now_s += took_s
        return StepRecord(
            step=0, started_s=self.now_s, seconds=took_s, kind="verify" if is_drafted else "decode",
            num_sequences=self.batch, num_decode_sequences=self.batch, num_tokens=self.batch,
            num_prefill_tokens=0, num_kv_tokens=400, num_logits_rows=self.batch, num_sampled_rows=0,
            num_emitted_tokens=self.batch + sum(work.num_accepted_tokens for work in drafts),
            schedule_s=0.0, draft_s=self.draft_s if is_drafted else 0.0, forward_s=0.0, verify_s=0.0,
            drafts=drafts,
        )  # fmt: skip

    def _accepted(self) -> int:
        for number in range(DEPTH):
            if self.rng.random() >= self.acceptance:
                return number
        return DEPTH


def watch(panel: GuardPanel, engine: Engine, seconds: float) -> list[Change]:
    """Changes of the door while the engine runs; it drafts only where the door lets it."""
    changes: list[Change] = []
    looked_s = engine.now_s
    share = engine.share
    for record in engine.steps(seconds):
        panel.add_step(record, engine.now_s)
        if engine.now_s - looked_s >= 0.3:
            looked_s = engine.now_s
            changes += panel.look(Conditions(looked_s, LoadView(), ("draft",), costs=NoCosts()))
        is_shut = DOOR in panel.doors and panel.doors[DOOR].state is DoorState.SHUT
        engine.share = 0.0 if is_shut else share
    engine.share = share
    return changes


def states(changes: list[Change]) -> list[DoorState]:
    return [change.after for change in changes]


def panel_of(config: GuardsConfig = CONFIG) -> GuardPanel:
    return GuardPanel(config, Limits())


def test_a_drafter_that_is_always_right_and_too_slow_is_shut() -> None:
    panel, engine = panel_of(), Engine(acceptance=1.0, draft_s=0.15)
    assert engine.gain < 0.6
    changes = watch(panel, engine, 20)
    assert states(changes)[0] is DoorState.SHUT
    assert changes[0].kind == "gain"
    assert "the pace of decoding with its drafts, at most, is 0." in changes[0].why
    assert "x that without, below 0.95" in changes[0].why
    assert panel.openings("chat", may_probe=False).shut["draft"].reason is Reason.LATENCY_GUARD
    row = next(r for r in panel.describe(engine.now_s) if r["guard"] == "latency_guard")
    assert (row["policy"], row["task"], row["state"], row["threshold"]) == ("draft", None, "shut", 0.95)
    assert 0.5 < row["reading"] < 0.95


def test_baseline_requests_that_share_its_steps_count() -> None:
    """Half of the batch drafts well, for its own good; the whole is slower for it."""
    engine = Engine(batch=8, num_drafting=4, acceptance=0.6, draft_s=0.020)
    assert replace(engine, num_drafting=8).gain > 0.95 > engine.gain
    assert states(watch(panel_of(), engine, 20))[:1] == [DoorState.SHUT]


def test_checking_that_takes_longer_than_it_saves_is_seen_beside_steps_without_drafts() -> None:
    """Prompt lookup: drafting is free. Where every step drafts there is nothing to compare with."""
    engine = Engine(acceptance=0.3, draft_s=0.0, verify_s=0.020, share=0.7)
    assert engine.gain < 0.8
    assert states(watch(panel_of(), engine, 20))[:1] == [DoorState.SHUT]
    assert watch(panel_of(), replace(engine, share=1.0), 20) == []


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_one_that_pays_stays_open(share: float) -> None:
    panel, engine = panel_of(), Engine(share=share)
    assert engine.gain > 1.5
    assert watch(panel, engine, 300) == []
    reading = panel.doors[DOOR].reading
    assert reading is not None
    assert reading.value > 1


def test_a_little_exploration_of_a_bad_one_is_no_reason() -> None:
    """It loses half of the time it is given, which is a fiftieth."""
    engine = Engine(acceptance=0.1, draft_s=0.020, share=0.02)
    assert engine.gain < 0.6
    assert watch(panel_of(), engine, 300) == []


@pytest.mark.parametrize("seed", range(3))
def test_nothing_flaps_at_the_threshold(seed: int) -> None:
    """Ten minutes. Just below even nothing moves; at the threshold, where some time is lost indeed, each
    trip shuts for twice as long: 5, 10, ... 320 s."""
    accepted = sum(0.5**j for j in range(1, DEPTH + 1))
    for gain, most in ((0.98, 0), (0.95, 2 * 7)):
        draft_s = 0.020 * (1 + accepted) / gain - 0.020
        engine = Engine(acceptance=0.5, draft_s=draft_s, verify_s=0.0, seed=seed)
        assert engine.gain == pytest.approx(gain)
        assert len(watch(panel_of(), engine, 600)) <= most


def test_it_is_tried_again_and_comes_back_once_mended() -> None:
    panel, engine = panel_of(), Engine(acceptance=0.8, draft_s=0.15)
    changes = watch(panel, engine, 40)
    assert states(changes)[:3] == [DoorState.SHUT, DoorState.PROBING, DoorState.SHUT]
    mended = Engine(now_s=engine.now_s)
    assert states(watch(panel, mended, 120))[-1] is DoorState.ALLOWED
    assert panel.openings("chat", may_probe=False).shut == {}
    assert watch(panel, mended, 120) == []  # what shut it is past


def test_few_probes_beside_many_others_are_judged_as_if_all_drafted() -> None:
    """One of eight pays alone for what eight would share: that would never let it back."""
    panel, engine = panel_of(), Engine(batch=8, num_drafting=8, draft_s=0.15)
    watch(panel, engine, 19)
    assert panel.doors[DOOR].state is DoorState.SHUT
    probes = Engine(batch=8, num_drafting=1, acceptance=0.6, draft_s=0.015, now_s=engine.now_s)
    assert probes.gain < 0.8
    assert states(watch(panel, probes, 15))[:2] == [DoorState.PROBING, DoorState.ALLOWED]


def test_prompts_warm_up_and_too_few_steps_say_nothing() -> None:
    bad = Engine(acceptance=0.0, draft_s=0.1)
    for change in ({"num_prefill_tokens": 64}, {"is_warm_up": True}, {"num_decode_sequences": 0}):
        panel = panel_of()
        for record in bad.steps(15):
            panel.add_step(replace(record, **change), bad.now_s)
            assert panel.look(Conditions(bad.now_s, LoadView(), ("draft",))) == []
        assert DOOR not in panel.doors
    many = replace(CONFIG, latency=replace(CONFIG.latency, min_gain_steps=10_000))
    assert watch(panel_of(many), bad, 30) == []
