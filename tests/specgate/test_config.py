"""Configuration: faults are named with file, line and path; nothing is accepted that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import AcceptRule
from specgate.config import LOCAL_CONFIG, config_json_schema, load_config, parse_config
from specgate.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
FAKE = "models: [{id: m, backend: fake}]\nauth: {keyless_on_loopback: true}\n"


def faults(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        parse_config(text, "c.yaml", overrides)
    return error.value.faults


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert load_config(path).models


def test_the_local_one_is_the_default_and_open_on_loopback_only() -> None:
    config = load_config()
    assert config == load_config(LOCAL_CONFIG)
    assert config.auth.keyless_on_loopback
    assert config.requests.allow_overrides
    assert config.server.host == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"auth\.api_keys"):
        load_config(overrides=["server.host=0.0.0.0"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server:\n  prot: 1\n", "c.yaml:4: server.prot: unknown key; did you mean 'port'?"),
        ("server:\n  port: 99999\n", "c.yaml:4: server.port: is 99999; must be at most 65535"),
        ("server:\n  port: yes\n", "c.yaml:4: server.port: is True; must be a whole number"),
        ("requests: {deadline_s: 0}\n", "c.yaml:3: requests.deadline_s: is 0.0; must be above 0"),
        ("requests: {deadline_s: .inf}\n", "c.yaml:3: requests.deadline_s: is inf; must be a number"),
        ("policy: {ngram_tasks: [chat, poetry]}\n", "c.yaml:3: policy.ngram_tasks.1: is 'poetry'; allowed:"),
        ("server: 3\n", "c.yaml:3: server: must be a mapping with keys of: host"),
        ("server: {port: 1}\nserver: {port: 2}\n", "c.yaml:4: server: given twice"),
        ("decision_log: {path: [a]}\n", "c.yaml:3: decision_log.path: must be text"),
        ("logging: {level: loud}\n", "c.yaml:3: logging.level: is 'loud'; allowed: debug, info"),
        ("auth2: 1\n", "c.yaml:3: auth2: unknown key; did you mean 'auth'?"),
    ],
)
def test_a_fault_says_where_and_what_is_allowed(text: str, expected: str) -> None:
    (fault,) = faults(FAKE + text)
    assert fault.startswith(expected)


def test_several_faults_are_all_reported() -> None:
    found = faults(FAKE + "server: {port: x, hots: y}\nlogging: {level: 1}\n")
    assert len(found) == 3


@pytest.mark.parametrize(
    ("models", "path"),
    [
        ("[]", "models"),
        ("[{id: a, backend: fake}, {id: a, backend: fake}]", "models.1.id"),
        ("[{id: a, backend: fake, engine: {}}]", "models.0.engine"),
        ("[{id: a, fake: {}}]", "models.0.fake"),
        ("[{id: 'a b', backend: fake}]", "models.0.id"),
        ("[{backend: fake}]", "models.0.id"),
        ("[{id: a, engine: {draft_model: {}}}]", "models.0.engine.draft_model"),
        ("[{id: a, engine: {ngram: {prompt_lookup_min: 6}}}]", "models.0.engine.ngram.prompt_lookup_min"),
        ("[{id: a, engine: {device: tpu}}]", "models.0.engine.device"),
        ("[{id: a, engine: {accept_rule: lossy}}]", "models.0.engine.accept_rule"),
    ],
)
def test_models_are_checked_as_a_whole(models: str, path: str) -> None:
    (fault,) = faults(f"auth: {{keyless_on_loopback: true}}\nmodels: {models}\n")
    assert f": {path}: " in fault


def test_keys_are_required_where_nobody_could_call_or_everybody() -> None:
    assert "nobody could call" in faults("models: [{id: m, backend: fake}]\n")[0]
    exposed = "models: [{id: m, backend: fake}]\nserver: {host: '::'}\nauth: {keyless_on_loopback: true}\n"
    assert "can be reached from outside" in faults(exposed)[0]


def test_overrides_are_typed_and_name_themselves() -> None:
    config = parse_config(
        "models: [{id: a, engine: {}}]\nauth: {keyless_on_loopback: true}", "c",
        [
            "server.port=0", "models.0.engine.accept_rule=block", "policy.max_requests_per_s=null",
            "models.0.engine.ngram=null", "policy.window_s=1e1",
            "models.0.engine.draft_model.layers_of_target=2",
        ],
    )  # fmt: skip
    engine = config.models[0].engine
    assert engine is not None
    assert (config.server.port, engine.accept_rule, engine.ngram) == (0, AcceptRule.BLOCK, None)
    assert (config.policy.max_requests_per_s, config.policy.window_s) == (None, 10.0)
    assert engine.draft_model is not None
    assert engine.draft_model.layers_of_target == 2
    for override, message in (
        ("server.prot=1", "--set server.prot: server.prot: unknown key"),
        ("port", "--set port: write dotted.key=value"),
        ("models.7.id=x", "--set models.7.id: models.7: a list: use an index from 0 to 0"),
        ("server.port.x=1", "server.port"),
        ("server.port=[", "--set server.port"),
    ):
        assert any(message in fault for fault in faults(FAKE + "server: {port: 1}", override)), override


def test_a_guard_may_be_switched_off_without_quotes() -> None:
    """YAML reads a plain `off` as false."""
    text = FAKE + "guards: {queue_wait: {mode: off}}"
    assert parse_config(text, "c.yaml", ["guards.load.mode=off"]).guards.queue_wait.mode == "off"


def test_the_schema_file_is_up_to_date_and_describes_every_field() -> None:
    schema = config_json_schema()
    stored = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    assert stored == schema, "run: specgate check-config --schema > configs/schema.json"
    for section in schema["properties"].values():
        for name, field in section.get("properties", {}).items():
            assert field.get("description"), name


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="models: {}[]\n-#&*!|>'\"\\id,:0a\t%@`", max_size=60))
def test_any_wrong_text_gives_faults_with_a_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text, "c.yaml")
    assert all(fault.startswith("c.yaml:") for fault in error.value.faults)


IMPOSED = (
    "auth: {keyless_on_loopback: true}\n"
    "models: [{id: m, engine: {draft_model: {layers_of_target: 1}, imposed: {acceptance: [0.9, 0.5]}}}]\n"
)


def test_imposed_acceptance_is_for_benches_only() -> None:
    (fault,) = faults(IMPOSED)
    assert fault.startswith("c.yaml:2: models.0.engine.imposed: an acceptance no drafter earned")
    assert "--bench" in fault
    config = parse_config(IMPOSED, "c.yaml", ["benching=true"])
    assert config.models[0].engine is not None
    assert config.models[0].engine.imposed is not None
    assert config.models[0].engine.imposed.acceptance == (0.9, 0.5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("models.0.engine.draft_model=null", "needs draft_model"),
        ("models.0.engine.imposed.acceptance=[]", "needs at least one"),
        ("models.0.engine.imposed.acceptance=[0.5, 1.5]", "acceptance.1: is 1.5"),
    ],
)
def test_imposed_acceptance_is_checked(override: str, expected: str) -> None:
    (fault,) = faults(IMPOSED, "benching=true", override)
    assert expected in fault
