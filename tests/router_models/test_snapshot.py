"""Snapshots: readable, atomic, and never fatal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router_models import snapshot
from router_models.step_latency import StepLatency
from router_models.types import StepFeatures, StepTiming


def test_round_trip_and_readable(tmp_path: Path) -> None:
    model = StepLatency()
    model.learn_one(StepFeatures(1, 1, 10), StepTiming(0.02))
    path = tmp_path / "deep" / "models.json"
    snapshot.save(path, {"step_latency": model.state()}, {"model": "tiny"})
    loaded = snapshot.load(path)
    assert loaded.warning is None
    assert loaded.meta == {"model": "tiny"}
    assert StepLatency.from_state(loaded.models["step_latency"]).state() == model.state()
    assert "c_tok" in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["models.json"]


def test_no_file_is_no_warning(tmp_path: Path) -> None:
    assert snapshot.load(tmp_path / "none.json") == snapshot.LoadedSnapshot({}, {})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{not json",
        b"\xff\xfe\x00",
        b"[]",
        json.dumps({"format": "specgate-models", "version": 0, "models": {}, "meta": {}}).encode(),
        json.dumps({"format": "specgate-models", "version": 1, "models": []}).encode(),
    ],
)
def test_a_bad_file_is_set_aside_with_a_warning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "models.json"
    for number in (1, 2):
        path.write_bytes(content)
        loaded = snapshot.load(path)
        assert loaded.models == {}
        assert loaded.warning is not None
        assert f"models.json.bad-{number}" in loaded.warning
        assert not path.exists()
        assert (tmp_path / f"models.json.bad-{number}").read_bytes() == content


def test_values_json_has_no_word_for_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    snapshot.save(path, {"a": {"x": 1}})
    with pytest.raises(ValueError, match="JSON"):
        snapshot.save(path, {"a": {"x": float("nan")}})
    assert snapshot.load(path).models == {"a": {"x": 1}}
    assert [p.name for p in tmp_path.iterdir()] == ["models.json"]
