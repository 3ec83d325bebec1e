"""Rollouts in a running gateway: files, arms, the way back, restarts, operators, the command line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgate.cli import main
from specgate.config import CanaryConfig, Config, load_rollout
from specgate.errors import ConfigError
from specgate.rollouts import load_rollouts
from tests.specgate.gateway import MODEL, SUMMARY, Running, make_config, running

TRIAL = """
rollout: trial
overlay: {policies: [draft]}
stages_percent: [50, 100]
min_samples: 20
batch_samples: 10
min_stage_s: 0
"""


def write(folder: Path, *texts: str) -> Config:
    """A configuration whose rollouts are these."""
    rollouts = folder / "rollouts"
    rollouts.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (rollouts / f"{index}.yaml").write_text(text, encoding="utf-8")
    return make_config(canary=CanaryConfig(folder=str(rollouts), state_path=str(folder / "state.json")))


async def arms_of(server: Running, users: range) -> dict[int, Any]:
    answers = await asyncio.gather(
        *(server.chat(messages=SUMMARY, max_tokens=4, user=f"u{i}") for i in users)
    )
    assert all(a.status_code == 200 for a in answers)
    return {i: (a.json()["specgate"]["arm"], a.headers.get("X-SpecGate-Arm"), a.json()["specgate"])
            for i, a in zip(users, answers, strict=True)}  # fmt: skip


async def test_arms_show_in_answers_metrics_and_the_log_and_stick_over_a_restart(tmp_path: Path) -> None:
    config = write(tmp_path, TRIAL)
    async with running(config) as server:
        arms = await arms_of(server, range(16))
        assert {arm for arm, _, _ in arms.values()} == {"candidate", "control"}
        for arm, header, extra in arms.values():
            assert header == arm
            assert extra["rollout"] == "trial"
            if arm == "candidate":
                assert extra["policy"] == "draft"
            else:
                assert (extra["policy"], extra["reason"]) == ("ngram", "canary_control")
        num = sum(arm == "candidate" for arm, _, _ in arms.values())
        series = 'specgate_canary_requests_total{arm="candidate",name="trial",outcome="ok"}'
        assert await server.metric(series) == num
        labels = 'arm="control",policy="ngram",reason="canary_control",task="summarization"'
        assert await server.metric(f"specgate_decisions_total{{{labels}}}") == 16 - num
        assert await server.metric('specgate_canary_share_ratio{name="trial"}') == 0.5
        logged = (await server.client.get("/admin/decisions")).json()["decisions"]
        assert {entry["arm"] for entry in logged} == {"candidate", "control"}
        state = (await server.client.get("/admin/state")).json()["canary"]["trial"]
        assert (state["status"], state["stage"], state["num_samples"]["candidate"]) == ("running", 0, num)
        named = await server.chat(messages=SUMMARY, specgate={"policy": "ngram"}, user="u1")
        assert (named.json()["specgate"]["arm"], named.json()["specgate"]["reason"]) == (None, "override")
    async with running(config) as server:
        again = await arms_of(server, range(16))
        assert {i: arm for i, (arm, _, _) in again.items()} == {i: arm for i, (arm, _, _) in arms.items()}
        state = (await server.client.get("/admin/state")).json()["canary"]["trial"]
        assert sum(state["num_samples"].values()) == 32


async def test_a_failing_candidate_is_rolled_back_and_stays_so(tmp_path: Path) -> None:
    config = write(tmp_path, TRIAL)
    async with running(config) as server:
        users = [i for i, (arm, _, _) in (await arms_of(server, range(24))).items() if arm == "candidate"]
        server.fake.script = replace(server.fake.script, fail_after_tokens=0)
        for user in users * 3:
            assert (await server.chat(messages=SUMMARY, user=f"u{user}")).status_code == 503
        server.fake.script = replace(server.fake.script, fail_after_tokens=None)
        state = (await server.client.get("/admin/state")).json()["canary"]["trial"]
        assert state["status"] == "rolled_back"
        assert state["why"].startswith("error_ratio")
        assert {arm for arm, _, _ in (await arms_of(server, range(8))).values()} == {None}
        assert await server.metric('specgate_canary_share_ratio{name="trial"}') == 0.0
    async with running(config) as server:
        assert {arm for arm, _, _ in (await arms_of(server, range(8))).values()} == {None}
        response = await server.client.post("/admin/canary/trial/resume")
        assert response.json()["trial"]["status"] == "running"
        assert "candidate" in {arm for arm, _, _ in (await arms_of(server, range(8))).values()}


async def test_shadow_decides_and_logs_and_changes_nothing(tmp_path: Path) -> None:
    config = write(tmp_path, TRIAL.replace("rollout: trial", "rollout: trial\nmode: shadow"))
    async with running(config) as server:
        arms = await arms_of(server, range(16))
        assert {arm for arm, _, _ in arms.values()} == {"shadow", None}
        assert {extra["policy"] for _, _, extra in arms.values()} == {"ngram"}
        logged = (await server.client.get("/admin/decisions")).json()["decisions"]
        assert {e["shadow"]["policy"] if e["arm"] == "shadow" else e["shadow"] for e in logged} == {
            "draft",
            None,
        }


async def test_by_hand_over_http(tmp_path: Path) -> None:
    async with running(write(tmp_path, TRIAL)) as server:
        post = server.client.post
        assert (await post("/admin/canary/trial/pause")).json()["trial"]["status"] == "paused"
        refused = await post("/admin/canary/trial/pause")
        assert refused.status_code == 409
        assert refused.json()["error"]["message"].startswith("The rollout trial is paused")
        assert (await post("/admin/canary/trial/promote")).json()["trial"]["share"] == 1.0
        assert {arm for arm, _, _ in (await arms_of(server, range(6))).values()} == {"candidate"}
        assert (await post("/admin/canary/trial/rollback")).json()["trial"]["status"] == "rolled_back"
        assert (await post("/admin/canary/other/pause")).status_code == 404
        assert (await post("/admin/canary/trial/explode")).status_code == 400
        saved = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
        assert saved["rollouts"]["trial"]["status"] == "rolled_back"


async def test_conflicting_rollouts_are_refused_with_a_sentence(tmp_path: Path) -> None:
    other = TRIAL.replace("rollout: trial", "rollout: zweiter\nscope: {tasks: [chat]}")
    async with running(write(tmp_path, TRIAL, other)) as server:
        state = (await server.client.get("/admin/state")).json()["canary"]
        assert state["trial"]["status"] == "running"
        assert state["zweiter"]["status"] == "refused"
        assert "concern the same requests" in state["zweiter"]["why"]
        refused = await server.client.post("/admin/canary/zweiter/promote")
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, state["zweiter"]["why"])


async def test_a_rollout_of_something_that_is_not_loaded_falls_at_once(tmp_path: Path) -> None:
    async with running(write(tmp_path, TRIAL.replace("[draft]", "[eagle]"))) as server:
        await asyncio.sleep(0)
        state = (await server.client.get("/admin/state")).json()["canary"]["trial"]
        assert (state["status"], state["why"]) == (
            "rolled_back", f"eagle: not loaded in {MODEL}; loaded: ngram, draft",
        )  # fmt: skip


async def test_a_bad_state_file_stops_rollouts_and_is_kept(tmp_path: Path) -> None:
    config = write(tmp_path, TRIAL)
    (tmp_path / "state.json").write_text("{half", encoding="utf-8")
    async with running(config) as server:
        assert {arm for arm, _, _ in (await arms_of(server, range(6))).values()} == {None}
        why = (await server.client.get("/admin/state")).json()["canary"]["trial"]["why"]
        assert "delete it to begin anew" in why
    assert (tmp_path / "state.json").read_text(encoding="utf-8") == "{half"


async def test_an_edited_rollout_begins_anew(tmp_path: Path) -> None:
    config = write(tmp_path, TRIAL)
    async with running(config) as server:
        await server.client.post("/admin/canary/trial/rollback")
    async with running(write(tmp_path, TRIAL.replace("[50, 100]", "[25, 100]"))) as server:
        state = (await server.client.get("/admin/state")).json()["canary"]["trial"]
        assert (state["status"], state["share"]) == ("running", 0.25)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"overlay: {policies: [draft]}": "overlay: {}"}, "overlay: changes nothing"),
        ({"[50, 100]": "[50, 20]"}, "stages_percent: must rise"),
        ({"[50, 100]": "[70, 100]"}, "no control arm"),
        ({"rollout: trial": "rollout: Big Name"}, "must match"),
        ({"min_stage_s: 0": "min_stage_s: -1"}, "must be at least 0"),
        ({"min_stage_s: 0": "min_time: 1"}, "unknown key"),
        ({"{policies: [draft]}": "{thresholds: {window_s: 3}}"}, "cannot be changed for an arm"),
        ({"{policies: [draft]}": "{prompt: x}"}, "unknown key"),
        ({"{policies: [draft]}": "{policies: [draft], drafter: draft}"}, "give one of the two"),
        ({"min_samples: 20": "min_samples: 5"}, "less than one batch"),
    ],
)
def test_faults_in_a_rollout_are_named(tmp_path: Path, change: dict[str, str], fault: str) -> None:
    text = TRIAL
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=fault):
        load_rollout(path)


def test_folders_of_rollouts(tmp_path: Path) -> None:
    assert load_rollouts(CanaryConfig()) == []
    with pytest.raises(ConfigError, match="is no folder"):
        load_rollouts(CanaryConfig(folder=str(tmp_path / "none")))
    config = write(tmp_path, TRIAL, TRIAL)
    with pytest.raises(ConfigError, match="already the name"):
        load_rollouts(config.canary)


def test_the_command_line_checks_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = sorted(str(path) for path in Path("configs/canary").glob("*.yaml"))
    assert examples
    assert main(["check-config", *examples]) == 0
    one, two = tmp_path / "1.yaml", tmp_path / "2.yaml"
    one.write_text(TRIAL, encoding="utf-8")
    two.write_text(TRIAL.replace("trial", "second"), encoding="utf-8")
    assert main(["check-config", str(one), str(two)]) == 1
    assert "concern the same requests" in capsys.readouterr().err
    assert main(["canary", "status", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err


async def test_the_command_line_acts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(write(tmp_path, TRIAL)) as server:
        await arms_of(server, range(12))

        async def canary(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["canary", *words, "--url", server.url])
            said = capsys.readouterr()
            return code, said.out + said.err

        code, said = await canary("status")
        assert code == 0
        assert "trial: running, started" in said
        assert "stage 1 of 2" in said
        code, said = await canary("rollback", "trial")
        assert code == 0
        assert said.startswith("trial: rolled_back, rolled back by hand\n  stage 1 of 2, a share of 0\n")
        code, said = await canary("promote", "trial")
        assert code == 1
        assert "answered 409: The rollout trial is rolled_back" in said
        code, said = await canary("status", "other")
        assert (code, "there is no rollout 'other'; there are: trial" in said) == (1, True)


def test_serve_refuses_a_folder_that_is_none_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--set", f"canary.folder={tmp_path / 'none'}"]) == 2
    assert "canary.folder: " in capsys.readouterr().err
