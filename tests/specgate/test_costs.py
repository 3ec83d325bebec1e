"""Costs of requests, and `specgate report` against /metrics of a server that really ran them."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.types import DeviceUse, SequenceStats
from specgate.cli import main
from specgate.config import AuthConfig, CostsConfig, DecisionLogConfig, KeyConfig
from specgate.costs import device_of, kv_bytes_per_token
from tests.specgate.gateway import MODEL, Running, make_config, running

KEYS = {"acme": "k-acme", "beta": "k-beta"}


def _sum_of(text: str, name: str, by: str = "") -> Any:
    """A counter's samples added up; by one label, a dict."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"specgate_{name}":
                key = sample.labels[by] if by else ""
                sums[key] = sums.get(key, 0) + sample.value
    return sums if by else sums.get("", 0)


def _report(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["report", "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


async def _traffic(server: Running) -> None:
    """Requests of every kind: two keys, three policies, whole, streamed, several answers, cut by a stop."""
    keys = [{"Authorization": f"Bearer {KEYS[name]}"} for name in ("acme", "acme", "beta")]
    for number, headers in enumerate(keys * 4):
        policy = ("baseline", "ngram", "draft")[number % 3]
        body: dict[str, Any] = {"max_tokens": 5 + number, "specgate": {"policy": policy}}
        body |= {"stream": True} if number % 2 else {}
        body |= {"n": 3} if number % 5 == 0 else {}
        body |= {"stop": ["there"]} if number == 7 else {}
        response = await server.chat(headers=headers, **body)
        assert response.status_code == 200
    await server.settled()


async def test_the_report_adds_up_to_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "decisions.jsonl"
    config = make_config(
        # small files, so that the log is rotated
        decision_log=DecisionLogConfig(path=str(log), max_bytes=9_000, max_files=50),
        costs=CostsConfig(price_per_device_hour=3.6, currency="EUR"),
        auth=AuthConfig(api_keys=tuple(KeyConfig(name=n, sha256=_sha256(key)) for n, key in KEYS.items())),
    )
    async with running(config, step_s=0.002) as server:
        await _traffic(server)
        text = (await server.client.get("/metrics")).text
    rotated = _rotated(log)
    assert rotated
    _pack(rotated[-1])
    told = _report(capsys, "--log", str(log))

    assert len(told["files"]) == len(rotated) + 1
    assert told["num_damaged_lines"] == 0
    total = told["total"]
    for name, metric in {
        "num_requests": "decisions_total",
        "num_output_tokens": "output_tokens_total",
        "num_prompt_tokens": "prompt_tokens_total",
        "num_target_steps": "target_steps_total",
        "num_target_steps_saved": "target_steps_saved_total",
        "num_draft_tokens": "draft_tokens_total",
        "num_accepted_tokens": "accepted_tokens_total",
    }.items():
        assert total[name] == _sum_of(text, metric) > 0, name
    by_policy = {policy: row["num_requests"] for policy, row in told["by_policy"].items()}
    assert by_policy == _sum_of(text, "decisions_total", "policy")
    by_task = {task: row["num_output_tokens"] for task, row in told["by_task"].items()}
    assert by_task == _sum_of(text, "tenant_output_tokens_total", "task")
    # Seconds differ by the rounding of sums only.
    exactly = lambda value: pytest.approx(value, rel=1e-9)  # noqa: E731
    for part in ("draft", "forward", "verify"):
        measured = {
            sample.labels["policy"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "specgate_device_seconds_total" and sample.labels["part"] == part
        }
        told_s = {method: parts[f"{part}_s"] for method, parts in told["device_seconds"].items()}
        assert {m: s for m, s in told_s.items() if s} == exactly({m: s for m, s in measured.items() if s})
    assert total["draft_s"] == exactly(_sum_of(text, "draft_seconds_total"))
    assert total["device_s"] == exactly(_sum_of(text, "device_seconds_total"))
    by_tenant = {tenant: row["device_s"] for tenant, row in told["by_tenant"].items()}
    assert by_tenant == exactly(_sum_of(text, "tenant_device_seconds_total", "tenant"))
    assert total["amount"] == exactly(total["device_s"] * 3.6 / 3600)
    assert told["currency"] == "EUR"


async def test_what_speculation_saved_is_told_against_plain_tokens_of_the_same_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    async with running(make_config(decision_log=DecisionLogConfig(path=str(log))), step_s=0.004) as server:
        await server.chat(max_tokens=12, specgate={"policy": "baseline"})  # 12 steps of 3 ms of device time
        await server.chat(max_tokens=12, specgate={"policy": "ngram"})  # 4 steps of 4 ms
        await server.settled()
    told = _report(capsys, "--log", str(log))
    assert told["by_policy"]["ngram"]["saved_s"] == pytest.approx(12 * 0.003 - 4 * 0.004)
    assert told["by_policy"]["baseline"]["saved_s"] == 0
    assert told["total"]["saved_ratio"] == pytest.approx(0.020 / (0.052 + 0.020))
    assert told["total"]["amount"] is None  # no price was set
    priced = _report(capsys, "--log", str(log), "--price-per-device-hour", "36")
    assert priced["total"]["amount"] == pytest.approx(0.052 * 0.01)
    assert priced["total"]["saved_amount"] == pytest.approx(0.020 * 0.01)


async def test_consistency_checks_are_in_the_sum_and_in_no_requests_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    config = make_config(decision_log=DecisionLogConfig(path=str(log)))
    config = replace(
        config, guards=replace(config.guards, consistency=replace(config.guards.consistency, share=1.0))
    )
    async with running(config, step_s=0.001) as server:
        await server.chat(max_tokens=9, temperature=0, specgate={"policy": "ngram"})
        await server.settled()
        checker = server.gateway.models[MODEL].checker
        assert await checker.check_next() in ("match", "mismatch", None)
        checks = await server.metric('specgate_consistency_checks_total{result="match"}')
        text = (await server.client.get("/metrics")).text
        state = (await server.client.get("/admin/state")).json()
    told = _report(capsys, "--log", str(log))
    assert checks == 1
    assert told["consistency_checks_device_s"] == pytest.approx(9 * 0.00075)
    assert state["costs"]["consistency_checks_device_s"] == pytest.approx(9 * 0.00075)
    spent = sum(sum(parts.values()) for parts in told["device_seconds"].values())
    assert spent == pytest.approx(_sum_of(text, "device_seconds_total"))
    assert told["total"]["num_requests"] == 1


@pytest.mark.parametrize(
    ("damage", "num_damaged", "num_sound"),
    [
        (lambda log: log.write_bytes(log.read_bytes()[:-40]), 1, 2),  # the last line breaks off
        (lambda log: log.write_bytes(b'\xff\xfe{"time"\n' + log.read_bytes()), 1, 3),
        (lambda log: log.write_bytes(b'{"time": 1}\n[1]\n' + log.read_bytes() + b"\n\n"), 2, 3),
    ],
)
async def test_damaged_lines_are_counted_and_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    num_damaged: int,
    num_sound: int,
) -> None:
    log = tmp_path / "decisions.jsonl"
    async with running(make_config(decision_log=DecisionLogConfig(path=str(log)))) as server:
        for _ in range(3):
            await server.chat(max_tokens=3)
    damage(log)
    told = _report(capsys, "--log", str(log))
    assert told["num_damaged_lines"] == num_damaged
    assert told["total"]["num_requests"] == num_sound
    assert main(["report", "--log", str(log)]) == 0
    assert f"{num_damaged} of {told['num_lines']} lines are damaged" in capsys.readouterr().out


def test_a_packed_file_that_breaks_off_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"time": 5.0, "model": "m", "policy": "baseline", "task": "chat", "outcome": "ok"}
    whole = gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for _ in range(2000)))
    (tmp_path / "d.jsonl.1.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "d.jsonl").write_text(json.dumps(line | {"time": 6.0}) + "\n")
    told = _report(capsys, "--log", str(tmp_path / "d.jsonl"))
    assert 1 <= told["total"]["num_requests"] < 2001
    assert "could not be read to its end" in told["faults"][0]
    later = _report(capsys, "--log", str(tmp_path / "d.jsonl"), "--since", "1970-01-02")
    assert later["total"]["num_requests"] == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--log", "nowhere.jsonl"], "no decision log"),
        (["--log", "x", "--since", "yesterday"], "is no time"),
        (["--log", "x", "--month", "11"], "write it as"),
        (["--log", "x", "--month", "2026-11", "--since", "1d"], "either --month"),
    ],
)
def test_wrong_use_is_told(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *options]) == 2
    assert word in capsys.readouterr().err


async def test_an_answer_tells_what_it_cost() -> None:
    async with running(make_config(costs=CostsConfig(price_per_device_hour=3600.0)), step_s=0.004) as server:
        body = (await server.chat(max_tokens=6, specgate={"policy": "ngram"})).json()
        costs = body["specgate"]["costs"]
        assert costs["num_target_steps"] == 2
        assert costs["num_target_steps_saved"] == 4
        assert costs["draft_s"] == pytest.approx(0.002)
        assert costs["device_s"] == costs["amount"] == pytest.approx(0.008)
        assert costs["per_1k_tokens"] == pytest.approx(1000 * 0.008 / 6)
        assert (costs["network_s"], costs["kv_bytes"], costs["currency"]) == (None, None, "USD")


def test_device_time_of_several_answers_is_one_sum_by_method() -> None:
    plain = DeviceUse("baseline", 2, 0, 1.0, 0.5, 0.25)
    one = SequenceStats(device=(plain, DeviceUse("ngram", 4, 0.5, 1, 1)))
    two = SequenceStats(device=(DeviceUse("ngram", 1, 0.25, 1, 1),))
    assert device_of([one, two]) == (
        plain,
        DeviceUse("ngram", 5, 0.75, 2, 2),
    )


def test_bytes_of_a_kv_token_are_known_only_where_the_backend_tells() -> None:
    details = {"memory_bytes": {"target_kv": 6400}, "num_blocks": 10, "block_size": 16}
    assert kv_bytes_per_token(details) == 40
    assert kv_bytes_per_token({"device": "none"}) is None


def _rotated(log: Path) -> list[Path]:
    return sorted(log.parent.glob(f"{log.name}.*"))


def _pack(file: Path) -> None:
    with file.open("rb") as plain, gzip.open(f"{file}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    file.unlink()


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
