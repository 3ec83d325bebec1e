"""A process that speaks the engine protocol by a script: no engine, exact behaviour.

`config.model` is a JSON object: `log` (file every received message is appended to, one per line)
and `acts`, one list of words per start (the last one repeats):

die CODE · fatal MESSAGE · permanent MESSAGE · garbage · ready · deaf (no pongs) · mute (no steps)
· stay (ignore Shutdown) · slow (never ready)

A request is answered with tokens 1, 2, 3 in a step each, unless its label says `refuse`, `die`
(after the first token), `wait` (no token until aborted) or `first` (one token, then as `wait`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path

from engine.types import EngineLoad, FinishReason, SequenceOutput, SequenceStats, StepRecord
from specgate.backends.embedded import wire

IDLE = EngineLoad(0, 0, 8, 0, 0, 8)
RECORD = StepRecord(1, 0.0, 0.1, "decode", 1, 1, 1, 0, 1, 1, 0, 1, 0.0, 0.0, 0.1, 0.0)


class Script:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.words: set[str] = set()
        self.log = Path(os.devnull)

    def send(self, message: wire.FromWorker) -> None:
        self.sock.sendall(wire.encode(message))

    def step(self, *outputs: SequenceOutput) -> None:
        self.send(wire.Step(outputs, RECORD, IDLE))

    def begin(self, start: wire.Start) -> None:
        script = json.loads(start.config.model)
        self.log = Path(script["log"])
        num_starts = self.log.read_text().count("Start") if self.log.exists() else 0
        self.note("Start")
        acts = script["acts"][min(num_starts, len(script["acts"]) - 1)]
        self.words = {act.split(" ", 1)[0] for act in acts}
        self.send(wire.Loading("loading weights", 0.42))
        for act in acts:
            word, _, rest = act.partition(" ")
            match word:
                case "die":
                    os._exit(int(rest))
                case "fatal" | "permanent":
                    self.send(wire.Fatal(rest, is_permanent=word == "permanent"))
                    os._exit(1)
                case "garbage":
                    self.sock.sendall(b"\x00\x00\x00\x04\xff\xff\xff\xff")
                case "ready":
                    self.send(wire.Ready(64, 100, {"ngram": 4}, IDLE))

    def note(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(line + "\n")

    def handle(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Start():
                self.begin(message)
            case wire.Ping():
                if "deaf" not in self.words:
                    self.send(wire.Pong())
            case wire.Submit(request):
                self.note(f"Submit {request.request_id}")
                if "mute" not in self.words:
                    self.answer(request.request_id, request.label)
            case wire.Abort(request_id):
                self.note(f"Abort {request_id}")
                self.step(SequenceOutput(request_id, finish_reason=FinishReason.ABORT, stats=SequenceStats()))
            case wire.Shutdown():
                self.note("Shutdown")
                if "stay" in self.words:
                    time.sleep(600)
                os._exit(0)
            case _:
                self.note(repr(message))

    def answer(self, request_id: str, label: str) -> None:
        match label:
            case "refuse":
                self.send(wire.Refused(request_id, "too long", "prompt"))
            case "wait":
                return
            case "die":
                self.step(SequenceOutput(request_id, (1,)))
                os.kill(os.getpid(), signal.SIGKILL)
            case "first":
                self.step(SequenceOutput(request_id, (1,)))
            case _:
                for token in (1, 2):
                    self.step(SequenceOutput(request_id, (token,)))
                self.step(SequenceOutput(request_id, (3,), finish_reason=FinishReason.LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    script = Script(socket.socket(fileno=parser.parse_args().fd))
    frames = wire.FrameSplitter()
    while data := script.sock.recv(65536):
        for body in frames.feed(data):
            script.handle(wire.decode_to_worker(body))


if __name__ == "__main__":
    main()
