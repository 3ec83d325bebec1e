"""The protocol between the gateway and its engine process.

Both sides write frames over a local stream socket: four bytes of big-endian length, then one
msgpack message. Messages are tagged structs; the engine's dataclasses travel inside them as they
are. Nothing here can run code on arrival (no pickle), and a frame of absurd length is refused.

To the engine process: `Start` first, then any of `Submit`, `Abort`, `SetForce`, `SetShut`,
`SetDrafters`, `Snapshot`, `Ping`, and `Shutdown` last. Back: `Loading` while weights are read, one
`Ready`, then a `Step` per engine step, `Drafters` after each `SetDrafters`, `Refused` for a request
that can never run, `Pong`, and `Fatal` before a deliberate exit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.types import EngineLoad, EngineRequest, SequenceOutput, StepRecord
from specgate.policy.shut import Shut

MAX_FRAME_BYTES = 256 * 1024 * 1024
_HEADER = struct.Struct(">I")


class WireError(Exception):
    """The peer sent something that is not a frame of this protocol."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Load this engine."""

    config: EngineConfig
    sweep_s: float = 0.0  # try out step sizes for this long; the records come as warm-up steps


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Run this request."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Drop this request before the next step; unknown or finished ids are ignored."""

    request_id: str


class SetForce(msgspec.Struct, tag=True, frozen=True):
    """Every sequence follows `policy` from its next step on; None lifts the force."""

    policy: str | None


class SetShut(msgspec.Struct, tag=True, frozen=True):
    """Policies that may not draft from the next step on; replaces the list before."""

    entries: tuple[Shut, ...]


class SetDrafters(msgspec.Struct, tag=True, frozen=True):
    """Of the configured drafters have exactly these loaded; `Drafters` answers."""

    methods: tuple[str, ...]


class Snapshot(msgspec.Struct, tag=True, frozen=True):
    """Fresh model state for the planner."""

    state: dict[str, Any]


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Asks for a `Pong`: is the process alive at all?"""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop and exit 0."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Start-up progress. `fraction` in 0..1, or None where it is unknown."""

    stage: str
    fraction: float | None = None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine takes requests; facts about what it serves."""

    max_model_len: int
    vocab_size: int
    methods: dict[str, int]  # method -> default number of draft tokens
    load: EngineLoad
    details: dict[str, Any] = {}  # device, dtype, kernels, blocks


class Step(msgspec.Struct, tag=True, frozen=True):
    """What one engine step has to say; see `engine.types.StepResult`."""

    outputs: tuple[SequenceOutput, ...]
    record: StepRecord | None
    load: EngineLoad


class Drafters(msgspec.Struct, tag=True, frozen=True):
    """The drafters that are loaded now, and what the engine's parts take; `error` says why they are not
    those that were wanted."""

    methods: dict[str, int]
    memory_bytes: dict[str, int]
    error: str | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The request can never run here; `param` is the field at fault."""

    request_id: str
    message: str
    param: str


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Ping`."""


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The process exits on purpose. `is_permanent`: starting again would fail the same way."""

    message: str
    is_permanent: bool


ToWorker = Start | Submit | Abort | SetForce | SetShut | SetDrafters | Snapshot | Ping | Shutdown
FromWorker = Loading | Ready | Step | Drafters | Refused | Pong | Fatal


def encode(message: ToWorker | FromWorker) -> bytes:
    """One frame: header and message."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)


def decode_to_worker(body: bytes) -> ToWorker:
    """A message from the gateway. Raises WireError."""
    try:
        return _TO_WORKER.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message to an engine process: {error}") from error


def decode_from_worker(body: bytes) -> FromWorker:
    """A message from the engine process. Raises WireError."""
    try:
        return _FROM_WORKER.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message from an engine process: {error}") from error


class FrameSplitter:
    """Cuts a byte stream into frames, whatever the sizes it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames completed by `data`. Raises WireError on an absurd length."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                (length,) = _HEADER.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]
