"""The servers of a bench: one per arm, so that `auto` learns from its own requests alone and every
arm's prefix cache sees the same prompts; or one for all, at a URL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.types import BASELINE
from specgate.bench.client import DEFAULT_ARM, BenchError, Client, open_session
from specgate.bench.lockstep import Lockstep, StopClock
from specgate.clock import Clock
from specgate.launch import LaunchError, Server

AUTO, DRAFT = "auto", "draft"
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the servers come from. `url` is a running one; else they are started from `config`."""

    url: str | None = None
    config: Path | None = None
    settings: tuple[str, ...] = ()
    token: str | None = None
    timeout_s: float = 600.0
    is_shared: bool = False  # one started server for all arms
    imposed: tuple[float, ...] = ()  # acceptance per position of the draft arm
    lockstep_s: float | None = None  # arms run all at once, this long each in turn; None: one after
    # another. Needs a server of its own for each arm.

    def all_settings(self) -> list[str]:
        """What is set on a server started here, beside its config. The caller's own come last."""
        settings = [
            "decision_log.path=null",
            "learning.folder=null",  # what one bench learned must not help, or spoil, the next
            "logging.level=warning",
            "requests.allow_overrides=true",
        ]
        if self.imposed:
            settings += ["benching=true", f"models.0.engine.imposed.acceptance={list(self.imposed)}"]
        return settings + list(self.settings)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A client for each arm. Arms may share a server."""

    clients: Mapping[str, Client]
    max_model_len: int | None = None
    methods: tuple[str, ...] = ()  # loaded speculation methods; empty where the server knows none
    is_specgate: bool = True
    urls: tuple[str, ...] = field(default=())
    lockstep: Lockstep | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.clients)

    @property
    def is_shared(self) -> bool:
        return len(set(self.urls)) == 1

    async def state(self, arm: str) -> dict[str, Any]:
        """The arm's server as /admin/state tells it; empty where it may not be asked."""
        return await self.clients[arm].get_json("/admin/state") or {}


@contextlib.asynccontextmanager
async def open_fleet(
    options: ServerOptions, arms: Sequence[str], clock: Clock, say: Say
) -> AsyncIterator[Fleet]:
    """Start (or find) the servers and check that they know the arms. Raises BenchError."""
    async with contextlib.AsyncExitStack() as stack:
        # Timeouts are the machine's seconds: in lockstep an arm has its share of them.
        timeout_s = options.timeout_s * (1 if options.lockstep_s is None else len(arms))
        session = await stack.enter_async_context(open_session(options.token, timeout_s))
        urls: list[str] = []
        clocks: list[Clock] = []
        lockstep = None if options.lockstep_s is None else Lockstep(options.lockstep_s)
        for arm in arms:
            clocks.append(clock)
            if options.url is not None:
                urls.append(options.url)
            elif urls and options.is_shared:
                urls.append(urls[0])
            elif lockstep is None:
                urls.append((await _start(stack, options, arm, say)).url)
            else:
                clocks[-1] = own = stack.enter_context(StopClock())
                server = await _start(stack, options, arm, say, own)
                urls.append(server.url)
                lockstep.add(arm, server.process.pid, own)
        clients = {
            arm: Client(session, url, arm, own) for arm, url, own in zip(arms, urls, clocks, strict=True)
        }
        yield replace(await _check(clients, tuple(urls)), lockstep=lockstep)


async def _start(
    stack: contextlib.AsyncExitStack,
    options: ServerOptions,
    arm: str,
    say: Say,
    clock: StopClock | None = None,
) -> Server:
    who = "the server" if options.is_shared else f"the server of {arm}"
    say(f"starting {who}")
    try:
        return await stack.enter_async_context(
            Server.start(
                options.config,
                options.all_settings(),
                on_progress=lambda m: say(f"{who}: {m}"),
                env=None if clock is None else clock.environment,
                leads_group=clock is not None,
            )
        )
    except LaunchError as error:
        raise BenchError(str(error)) from error


async def _check(clients: Mapping[str, Client], urls: tuple[str, ...]) -> Fleet:
    entries = [await client.find_model() for client in clients.values()]
    known = entries[0].get("specgate")
    if not isinstance(known, dict):
        if any(arm != DEFAULT_ARM for arm in clients):
            raise BenchError(f"{urls[0]} is no specgate server and knows no arms: use --arms {DEFAULT_ARM}")
        return Fleet(clients, entries[0].get("max_model_len"), is_specgate=False, urls=urls)
    methods = tuple(name for name in known.get("methods", {}) if name != BASELINE)
    allowed = (AUTO, BASELINE, DEFAULT_ARM, *methods)
    for arm in clients:
        if arm not in allowed:
            raise BenchError(f"arm {arm!r} is not loaded; there are {', '.join(allowed)}")
    return Fleet(clients, entries[0].get("max_model_len"), methods, urls=urls)
