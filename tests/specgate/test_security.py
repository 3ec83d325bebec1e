"""What must not happen whoever asks: code from data, text in logs, forged lines, labels without end."""

from __future__ import annotations

import ast
import hashlib
import io
import logging
from pathlib import Path

import pytest

from specgate.api.http import _match
from specgate.config import AuthConfig, DecisionLogConfig, KeyConfig
from specgate.telemetry.logs import TextFormatter
from tests.specgate.gateway import MODEL, make_config, running

ROOT = Path(__file__).parents[2]
SECRET = "sesame-opens-nothing"
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pickle.loads"}


def sources() -> list[Path]:
    return [path for name in ("specgate", "engine", "router_models") for path in (ROOT / name).rglob("*.py")]


def key(name: str) -> KeyConfig:
    return KeyConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest())


def test_nothing_that_is_read_can_run_code() -> None:
    assert len(sources()) > 100
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {name.split(".")[0] for name in names} & UNSAFE_MODULES, path
            elif isinstance(node, ast.Call):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                is_safe = given.get("weights_only") == "True"
                assert is_safe or ast.unparse(node.func) not in UNSAFE_CALLS, f"{path}:{node.lineno}"
                is_load = ast.unparse(node.func) in ("np.load", "numpy.load")
                assert given.get("allow_pickle", "" if is_load else "False") == "False", path


def test_keys_are_kept_as_hashes_and_every_one_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tuple(map(key, "abc"))
    compared: list[str] = []

    def compare(given: str, kept: str) -> bool:
        compared.append(kept)
        return given == kept

    monkeypatch.setattr("specgate.api.http.hmac.compare_digest", compare)
    assert [_match(token, keys) for token in ("a", "c", "d", "", "\udcff")] == ["a", "c", None, None, None]
    assert compared == [key.sha256 for key in keys] * 5  # a first key that fits ends nothing early


async def test_api_keys_open_no_admin_path_and_admin_keys_no_model() -> None:
    config = make_config(auth=AuthConfig(api_keys=(key("caller"),), admin_keys=(key("operator"),)))
    async with running(config) as server:
        for method, path, right in (
            ("GET", "/v1/models", "caller"), ("POST", "/tokenize", "caller"),
            ("GET", "/admin/state", "operator"), ("POST", "/admin/reload", "operator"),
            ("PUT", "/admin/policy", "operator"), ("GET", "/%61dmin/state", "operator"),
            ("GET", "/v1/../admin/state", "operator"), ("GET", "//admin/state", ""),
        ):  # fmt: skip
            for name in ("caller", "operator"):
                bearer = {"Authorization": f"Bearer {name}"}
                answer = await server.client.request(method, path, headers=bearer)
                may = right in (name, "")
                assert (answer.status_code == 401) != may, (path, name, answer.status_code)
                assert right or answer.status_code in (401, 404)


async def test_texts_are_in_no_log_and_no_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = make_config(decision_log=DecisionLogConfig(path=str(tmp_path / "log")))
    async with running(config) as server:
        asked = [{"role": "user", "content": SECRET}]
        for body in (
            {}, {"stream": True}, {"temperature": 9}, {"stop": [SECRET]}, {"user": SECRET},
            {"model": SECRET}, {"metadata": {"a": SECRET}}, {SECRET: 1}, {"stop": SECRET * 100},
            {"specgate": {"policy": SECRET}},
        ):  # fmt: skip
            await server.chat(messages=asked, **body)
        server.fake.script = None  # type: ignore[assignment]  # a fault of our own, in the middle
        assert (await server.chat(messages=asked)).status_code == 500
        await server.settled()
        paths = ("/metrics", "/admin/state", "/admin/decisions")
        shown = [(await server.client.get(path)).text for path in paths]
    assert "request" in caplog.text
    for text in (caplog.text, (tmp_path / "log").read_text(), *shown):
        assert SECRET not in text


async def test_no_label_holds_what_callers_send() -> None:
    """Models, policies, endpoints, ids: what is not known by configuration is "none"."""
    async with running() as server:
        name = "sent-by-caller"
        await server.chat(model=name)
        await server.chat(specgate={"policy": name})
        await server.chat(user=name, metadata={"a": name}, service_tier=name)
        await server.chat(headers={"X-Request-Id": name, "X-SpecGate-Policy": name})
        for method, path in (("GET", f"/v1/models/{name}"), ("POST", f"/v1/{name}")):
            await server.client.request(method, path)
        await server.client.post(f"/admin/canary/{name}/{name}")
        text = (await server.client.get("/metrics")).text
        assert 'specgate_requests_total{endpoint="chat",model="none",outcome="refused"' in text
        assert name not in text


@pytest.mark.parametrize("text", ["a\nINFO forged: line", "\x1b[2Jcleared", "a\r\n2026-01-01 INFO x: y"])
def test_no_message_forges_another_line(text: str) -> None:
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(TextFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("said %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed with %s", text)
    lines = sink.getvalue().splitlines()
    own = [line for line in lines if not line.startswith("    ")]
    assert [line.split(":")[0] for line in own] == ["WARNING test", "ERROR test"]
    assert "\x1b" not in sink.getvalue()


async def test_a_field_that_could_break_a_header_does_not() -> None:
    async with running() as server:
        answer = await server.chat(headers={"X-Request-Id": "a b"}, model=f"{MODEL}\r\nX-Evil: 1")
        assert answer.status_code == 404
        assert "X-Evil" not in answer.headers
        assert answer.headers["X-Request-Id"] != "a b"
