"""`specgate serve` with an engine process that can be made to fail, and a wall clock that can jump."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop
from aiohttp import web

from specgate.app import build_app, serve
from specgate.backends.embedded.backend import EmbeddedBackend, EmbeddedConfig
from specgate.backends.embedded.supervisor import Supervision
from specgate.clock import SystemClock
from specgate.config import Config, load_config
from tests.drill.faults import FOLDER_VARIABLE, Faults

WORKER = (sys.executable, "-m", "tests.drill.worker")


class JumpingClock(SystemClock):
    """The machine's, with the wall clock set off by so many seconds."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def wall(self) -> float:
        return super().wall() + float(self._faults.get("clock") or 0)


def main() -> int:
    """`python -m tests.drill.server CONFIG PORT`"""
    file, port = sys.argv[1:]
    clock = JumpingClock(Faults(Path(os.environ[FOLDER_VARIABLE])))

    def read() -> Config:
        return load_config(file, [f"server.port={port}"])

    def build(config: Config, reread: Callable[[], Config] | None) -> web.Application:
        backends = {}
        for model in config.models:
            assert model.engine is not None
            supervision = Supervision(
                command=WORKER,
                hang_timeout_s=model.supervision.hang_timeout_s,
                backoff_min_s=0.05,
                tick_s=0.1,
            )
            backends[model.id] = EmbeddedBackend(EmbeddedConfig(model.id, model.engine, supervision), clock)
        return build_app(config, clock=clock, backends=backends, reread=reread)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(read(), read, build=build))


if __name__ == "__main__":
    sys.exit(main())
