"""A real Prometheus for tests: it scrapes one server once a second, with the shipped rules made quick."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.support import RULES, free_port, shortened, tool


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one."""

    client: httpx.AsyncClient

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's vector; fails if Prometheus refuses it."""
        answer = (await self.client.get("/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return list(answer["data"]["result"])

    async def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing ones."""
        return list((await self.client.get("/api/v1/alerts")).json()["data"]["alerts"])


@asynccontextmanager
async def prometheus(folder: Path, target: str, factor: int) -> AsyncIterator[Prometheus]:
    """Scrape `target` (host:port) as the job specgate; the rules' times are `factor` times shorter."""
    binary = tool("prometheus", "prometheus")
    names = []
    for path in sorted(RULES.glob("*.yml")):
        names.append(folder / path.name)
        names[-1].write_text(shortened(path.read_text(encoding="utf-8"), factor))
    config = folder / "prometheus.yml"
    scrape = {"job_name": "specgate", "static_configs": [{"targets": [target]}]}
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(name) for name in names],
                "scrape_configs": [scrape],
            }
        )
    )
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                await _until_ready(client, process, folder / "prometheus.log")
                yield Prometheus(client)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _until_ready(client: httpx.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(60):
        while True:
            assert process.returncode is None, await asyncio.to_thread(log.read_text)
            try:
                if (await client.get("/-/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
