"""The engine process's own parts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from specgate.backends.embedded import wire
from specgate.backends.embedded.worker import Outbox


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
