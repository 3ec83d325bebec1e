"""The engine process's own parts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from specgate.backends.embedded import wire
from specgate.backends.embedded.worker import Outbox, warm_up
from specgate.policy.plan_step import StepPlanner
from tests.engine.harness import all_drafters, make_engine


def test_the_outbox_never_waits_and_keeps_the_order() -> None:
    """Nobody reads while far more is put than a socket buffers; then all of it comes, in order."""
    ours, theirs = socket.socketpair()
    num_messages = 20_000
    with ours, theirs:
        outbox = Outbox(theirs)
        for number in range(num_messages):
            outbox.put(wire.Loading(f"stage {number} " + "x" * 100, None))
        frames = wire.FrameSplitter()
        stages: list[str] = []
        while len(stages) < num_messages:
            for body in frames.feed(ours.recv(1 << 20)):
                message = wire.decode_from_worker(body)
                assert isinstance(message, wire.Loading)
                stages.append(message.stage.split()[1])
        outbox.close()
    assert stages == [str(number) for number in range(num_messages)]


def test_a_process_whose_gateway_is_gone_at_once_ends() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "specgate.backends.embedded.worker", "--fd", str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL, env=dict(os.environ)
    )
    theirs.close()
    ours.close()
    assert process.wait(100) == 1


def test_the_warm_up_uses_every_drafter_and_leaves_nothing() -> None:
    drafters = {name: drafter for name, drafter in all_drafters({}).items() if name in ("ngram", "draft")}
    engine = make_engine(drafters, StepPlanner())
    asked: set[str] = set()
    for drafter in drafters.values():
        propose = drafter.propose

        def noting(contexts, propose=propose, name=drafter.name):  # type: ignore[no-untyped-def]
            asked.update(f"{name} {context.temperature}" for context in contexts)
            return propose(contexts)

        drafter.propose = noting  # type: ignore[method-assign]
    assert "attention=" in warm_up(engine)
    assert asked == {"ngram 0.0", "ngram 1.0", "draft 0.0", "draft 1.0"}
    engine.check_idle()
