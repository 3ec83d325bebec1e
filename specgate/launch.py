"""A specgate server as a child process: started on a free port, awaited, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

READY_LINE = "specgate ready on "
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


class LaunchError(Exception):
    """The server did not become ready. The message ends with the last it said."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    process: asyncio.subprocess.Process

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        config: Path | None = None,
        settings: Sequence[str] = (),
        on_progress: Callable[[str], object] = lambda _message: None,
        timeout_s: float = START_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        leads_group: bool = False,
    ) -> AsyncIterator[Server]:
        """Run `specgate serve --port 0` until the block is left. Raises LaunchError.

        `env` replaces the environment; `leads_group` makes it the leader of a process group, with its
        engine as a member.
        """
        command = [sys.executable, "-m", "specgate", "serve", "--port", "0"]
        command += ["--config", str(config)] if config else []
        for setting in settings:
            command += ["--set", setting]
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=env, start_new_session=leads_group,
            )  # fmt: skip
            try:
                url = await _ready_url(process, log, on_progress, timeout_s)
                yield cls(url, process)
            finally:
                await _stop(process)


async def _ready_url(
    process: asyncio.subprocess.Process,
    log: IO[bytes],
    on_progress: Callable[[str], object],
    timeout_s: float,
) -> str:
    assert process.stdout is not None
    reading = asyncio.create_task(_find_ready_line(process.stdout))
    try:
        for elapsed in range(int(timeout_s)):
            done, _ = await asyncio.wait([reading], timeout=1.0)
            if done:
                url = reading.result()
                if url is None:
                    raise LaunchError(f"the server ended before it was ready: {_last_words(log)}")
                return url
            on_progress(f"starting a server ({elapsed + 1} s)")
    finally:
        reading.cancel()
    raise LaunchError(f"the server was not ready after {timeout_s:.0f} s: {_last_words(log)}")


async def _find_ready_line(stdout: asyncio.StreamReader) -> str | None:
    """The URL of the ready line; None when the output ends without one."""
    async for raw in stdout:
        line = raw.decode(errors="replace").strip()
        if line.startswith(READY_LINE):
            return line.removeprefix(READY_LINE)
    return None


def _last_words(log: IO[bytes], num_lines: int = 5) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:]) or "it said nothing"


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL for one that does not listen."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
