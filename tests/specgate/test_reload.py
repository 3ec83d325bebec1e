"""The configuration exchanged in a running server: all of it or nothing, and what is said of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from specgate.clock import FakeClock
from specgate.config import AdmissionConfig, Config, FakeConfig, ModelConfig, load_config
from specgate.policy.canary import Status
from specgate.reload import changes, needs_restart
from specgate.rollouts import Rollouts, load_rollouts

ROLLOUT = Path(__file__).parents[2] / "configs" / "canary"


def test_changes_are_named_to_the_leaf() -> None:
    old = Config(models=(ModelConfig(id="m", backend="fake", fake=FakeConfig()),))
    assert list(changes(old, old)) == []
    new = replace(
        old,
        models=(replace(old.models[0], fake=FakeConfig(step_s=1.0)),),
        admission=AdmissionConfig(max_queue=3),
        server=replace(old.server, port=1, drain_grace_s=1.0),
    )
    found = list(changes(old, new))
    assert found == ["models.0.fake.step_s", "server.port", "server.drain_grace_s", "admission.max_queue"]
    assert [path for path in found if needs_restart(path)] == ["models.0.fake.step_s", "server.port"]
    for fixed in ("learning.folder", "telemetry.x", "benching", "guards.force_path", "canary.state_path"):
        assert needs_restart(fixed)
    for live in ("policy.router", "guards.load.max_rho", "canary.folder", "costs.currency", "auth.api_keys"):
        assert not needs_restart(live)
    more = replace(old, models=old.models * 2)
    assert list(changes(old, more)) == ["models"]


class Process:
    """A real server, its configuration file, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, file: Path, log: Path) -> None:
        self.process, self.file, self.log = process, file, log
        self.client = httpx.AsyncClient(base_url=url, timeout=20)

    def write(self, change: Callable[[dict[str, Any]], object]) -> None:
        config = yaml.safe_load(self.file.read_text())
        change(config)
        self.file.write_text(yaml.safe_dump(config))

    async def reload(self) -> httpx.Response:
        return await self.client.post("/admin/reload")

    async def num_reloads(self, result: str) -> float:
        text = (await self.client.get("/metrics")).text
        name = f'specgate_config_reloads_total{{result="{result}"}} '
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": "x", **body})


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Process]:
    file, log = tmp_path / "c.yaml", tmp_path / "log"
    config = {
        "auth": {"keyless_on_loopback": True},
        "models": [{"id": "m", "backend": "fake", "fake": {"step_s": 0.02, "text": "0123456789"}}],
        "canary": {"state_path": str(tmp_path / "canary.json")},
    }
    file.write_text(yaml.safe_dump(config))
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "specgate", "serve", "--config", str(file), "--port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=sink,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("specgate ready on "), line
        running = Process(process, line.split()[-1], file, log)
        async with running.client:
            yield running
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_limits_change_under_a_running_stream_and_faults_leave_everything_as_it_was(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 8000, "ignore_eos": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)

            server.write(lambda c: c.update(requests={"max_n": 2}))
            assert (await server.reload()).json() == {"reloaded": True, "changed": ["requests.max_n"]}
            assert "at most 2" in (await server.ask(n=3)).json()["error"]["message"]
            none = {"max_concurrent": 1, "max_queue": 0}
            server.write(lambda c: c.update(admission=none))
            done = await server.reload()
            changed = ["admission.max_concurrent", "admission.max_queue"]
            assert (done.status_code, done.json()) == (200, {"reloaded": True, "changed": changed})
            full = await server.ask()
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")

            server.write(lambda c: c.update(admission={"max_cuncurrent": 5}))
            wrong = await server.reload()
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_config")
            assert "admission.max_cuncurrent: unknown key" in wrong.json()["error"]["message"]
            server.write(lambda c: c.update(admission={"max_queue": 9}, server={"port": 1}))
            server.write(lambda c: c["models"][0].update(id="n"))
            fixed = await server.reload()
            assert (fixed.status_code, fixed.json()["error"]["code"]) == (409, "restart_needed")
            message = fixed.json()["error"]["message"]
            assert message == "Restart needed to change models.0.id; nothing was changed."
            server.file.unlink()
            gone = await server.reload()
            assert (gone.status_code, "cannot be read" in gone.json()["error"]["message"]) == (400, True)
            assert (await server.ask()).status_code == 429  # the limits in force are the last good ones
            for _ in range(10):  # the stream goes on all the while
                assert "error" not in await anext(lines)
        async with asyncio.timeout(20):
            while (await server.ask()).status_code != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        assert [await server.num_reloads(r) for r in ("ok", "invalid_config", "restart_needed")] == [2, 2, 1]
        logged = server.log.read_text()
        assert logged.count("the configuration stays as it was: ") == 3
        assert "admission.max_cuncurrent: unknown key" in logged


async def test_a_hang_up_reloads_and_command_line_settings_stay(tmp_path: Path) -> None:
    """`--port 0` is no change of the port; the log's level is switched at once."""
    async with served(tmp_path) as server:
        server.write(lambda c: c.update(logging={"level": "warning"}, policy={"router": "rule"}))
        os.kill(server.process.pid, signal.SIGHUP)
        async with asyncio.timeout(20):
            while await server.num_reloads("ok") < 1:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        server.write(lambda c: c.update(models=[]))
        os.kill(server.process.pid, signal.SIGHUP)
        async with asyncio.timeout(20):
            while await server.num_reloads("invalid_config") < 1:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        assert (await server.ask()).status_code == 200
        assert "models: at least one model is needed" in server.log.read_text()


async def test_a_key_is_taken_away_and_another_given(tmp_path: Path) -> None:
    from hashlib import sha256

    def key(name: str) -> dict[str, str]:
        return {"name": name, "sha256": sha256(name.encode()).hexdigest()}

    async with served(tmp_path) as server:
        for good, bad in (("old", "new"), ("new", "old")):
            server.write(lambda c, good=good: c["auth"].update(api_keys=[key(good)]))
            assert (await server.reload()).json()["changed"] == ["auth.api_keys"] or good == "new"
            answers = [
                await server.client.get("/v1/models", headers={"Authorization": f"Bearer {name}"})
                for name in (good, bad)
            ]
            assert [answer.status_code for answer in answers] == [200, 401]


def test_rollouts_go_on_begin_and_end_with_their_files(tmp_path: Path) -> None:
    class Metrics:
        def rollout_moved(self, *_: object) -> None: ...

        def arm_finished(self, *_: object) -> None: ...

    configs = load_rollouts(load_config(None, [f"canary.folder={ROLLOUT}"]).canary)
    first = configs[0]
    rollouts = Rollouts([first], None, Metrics(), FakeClock())
    asyncio.run(rollouts.act(first.rollout, "pause"))
    rollouts.replace([first])
    assert rollouts.describe()[first.rollout]["status"] == Status.PAUSED
    rollouts.replace([])
    assert rollouts.describe() == {}
    with pytest.raises(Exception, match="no rollout"):
        asyncio.run(rollouts.act(first.rollout, "resume"))
    rollouts.replace([first])  # its file is back: it goes on where it stood
    assert rollouts.describe()[first.rollout]["status"] == Status.PAUSED
    changed = replace(first, stages_percent=(first.stages_percent[0], 100.0))
    rollouts.replace([changed])
    assert rollouts.describe()[first.rollout]["status"] == Status.RUNNING
