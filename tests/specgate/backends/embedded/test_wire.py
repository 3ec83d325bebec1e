"""The protocol: what is sent arrives, in whatever pieces, and rubbish is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import DraftModelConfig, EngineConfig
from engine.types import (
    DrafterError,
    DraftWork,
    EngineLoad,
    EngineRequest,
    FinishReason,
    PolicyAssignment,
    PolicyChange,
    SamplingParams,
    SequenceOutput,
    SequenceStats,
    StepRecord,
    TokenLogprob,
)
from specgate.backends.embedded import wire

LOAD = EngineLoad(1, 2, 3, 4, 5, 6)
SAMPLING = SamplingParams(logit_bias={3: -100.0}, seed=2**63 - 1, stop_token_ids=(1, 2), num_logprobs=2)
STATS = SequenceStats(
    1, 2, 3, accepted_per_position=(2, 1), policy_changes=(PolicyChange(4, "ngram", "rule"),)
)
LOGPROB = TokenLogprob(3, float("-inf"), ((3, -0.5),))
RECORD = StepRecord(
    7, 0.5, 0.1, "mixed", 3, 2, 9, 4, 99, 5, 1, 5, 0.1, 0.2, 0.3, 0.4,
    (DraftWork("ngram", num_draft_tokens=3),), (DrafterError("draft", "nan", "NaN"),), kernels="attention=c",
)  # fmt: skip
TO_WORKER: list[wire.ToWorker] = [
    wire.Start(EngineConfig(draft_model=DraftModelConfig(layers_of_target=3))),
    wire.Submit(
        EngineRequest(
            "r1", (1, 2, 3), SAMPLING, PolicyAssignment("draft", 5, is_exact=True), 3, "salt", "chat"
        )
    ),
    wire.Abort("r1"),
    wire.SetForce("baseline"),
    wire.SetForce(None),
    wire.Snapshot({"coefficients": [1.5, None], "name": "步"}),
    wire.Ping(),
    wire.Shutdown(),
]
FROM_WORKER: list[wire.FromWorker] = [
    wire.Loading("loading weights", 0.5),
    wire.Ready(2048, 49152, {"ngram": 4}, LOAD, {"device": "cpu"}),
    wire.Step(
        (SequenceOutput("r1", (5,), (LOGPROB,), (None, LOGPROB), 1, 2, "ngram", FinishReason.STOP, STATS),),
        RECORD,
        LOAD,
    ),
    wire.Step((SequenceOutput("r2", finish_reason=FinishReason.ERROR, error="bad"),), None, LOAD),
    wire.Refused("r1", "too long", "prompt"),
    wire.Pong(),
    wire.Fatal("no model", is_permanent=True),
]


@given(st.lists(st.sampled_from(TO_WORKER), max_size=6), st.lists(st.integers(1, 60), max_size=40))
def test_messages_arrive_in_any_pieces(messages: list[wire.ToWorker], sizes: list[int]) -> None:
    data = b"".join(map(wire.encode, messages))
    splitter = wire.FrameSplitter()
    bodies = []
    for size in [*sizes, len(data) + 1]:
        bodies += splitter.feed(data[:size])
        data = data[size:]
    assert [wire.decode_to_worker(body) for body in bodies] == messages


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_messages_of_the_worker_arrive(message: wire.FromWorker) -> None:
    (body,) = wire.FrameSplitter().feed(wire.encode(message))
    assert wire.decode_from_worker(body) == message


@given(st.binary(max_size=200))
def test_rubbish_is_refused(body: bytes) -> None:
    """Never anything but a message or WireError."""
    for decode in (wire.decode_to_worker, wire.decode_from_worker):
        try:
            decode(body)
        except wire.WireError:
            continue


def test_each_side_refuses_the_other_sides_messages() -> None:
    (body,) = wire.FrameSplitter().feed(wire.encode(wire.Pong()))
    with pytest.raises(wire.WireError, match="not a message to"):
        wire.decode_to_worker(body)


def test_an_absurd_length_is_refused() -> None:
    with pytest.raises(wire.WireError, match="exceeds the limit"):
        list(wire.FrameSplitter().feed(b"\xff\xff\xff\xff"))
