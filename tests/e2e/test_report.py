"""`specgate report` adds up to /metrics of a real server with its engine process."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import write_config
from tests.e2e.server import Server, events, serve, until

pytestmark = pytest.mark.e2e


def _post(server: Server, number: int) -> None:
    """Requests of every kind at once; some leave in the middle of their stream."""
    policy = ("baseline", "ngram", "draft")[number % 3]
    body: dict[str, Any] = {
        "model": server.model, "prompt": f"{number} on and on and on and on", "ignore_eos": True,
        "max_tokens": 20 + number, "specgate": {"policy": policy}, "temperature": number % 2,
    }  # fmt: skip
    body |= {"n": 2} if number % 4 == 0 else {}
    if number % 5 == 4:
        body |= {"stream": True, "max_tokens": 4000}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as response:
            next(events(response))
        return
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=90).status_code == 200


def test_the_report_adds_up_to_the_metrics_of_a_real_server(tmp_path: Path) -> None:
    from engine.models.tiny_files import save_tiny_model

    engine: dict[str, object] = {
        "model": str(save_tiny_model(tmp_path / "model", num_layers=8, max_model_len=8192)),
        "num_threads": 1,
        "num_blocks": 2048,
        "max_sequences": 4,
        "ngram": {},
        "draft_model": {"layers_of_target": 1},
    }
    log = tmp_path / "decisions.jsonl"
    path = write_config(tmp_path, "tiny", engine)
    config = json.loads(path.read_text())
    config |= {
        "decision_log": {"path": str(log)},
        "costs": {"price_per_device_hour": 2.5},
        "guards": {"consistency": {"mode": "off"}},  # checks would go on after the scrape
    }
    path.write_text(json.dumps(config))
    with serve(path, "tiny") as server:
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda number: _post(server, number), range(18)))
        until(server.is_idle)
        text = server.get("/metrics").text
        command = [sys.executable, "-m", "specgate", "report", "--log", str(log), "--json"]
        told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    sums: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels.get(key, "") for key in ("policy", "part"))
            for key in ((sample.name,), (sample.name, *labels)):
                sums[key] = sums.get(key, 0.0) + sample.value
    total = told["total"]
    assert total["num_requests"] == sums["specgate_decisions_total",] == 18
    for name in ("output_tokens", "prompt_tokens", "target_steps", "target_steps_saved", "draft_tokens"):
        assert total[f"num_{name}"] == sums[f"specgate_{name}_total",] > 0, name
    assert told["num_requests_without_device_time"] == 0
    for method, parts in told["device_seconds"].items():
        for part in ("draft", "forward", "verify"):
            measured = sums.get(("specgate_device_seconds_total", method, part), 0.0)
            assert parts[f"{part}_s"] == pytest.approx(measured, rel=1e-9), (method, part)
    assert total["device_s"] == pytest.approx(sums["specgate_device_seconds_total",], rel=1e-9)
    assert total["amount"] == pytest.approx(total["device_s"] * 2.5 / 3600, rel=1e-9)
