"""The loop behind the inbox: serves, sleeps, survives a failed step, and stops."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.engine import Engine
from engine.errors import RequestRefused
from engine.service import Abort, Add, Call, EngineService, Message, Shutdown
from engine.types import EngineRequest, FinishReason, SequenceOutput, StepResult
from tests.engine.harness import GREEDY, all_drafters, make_engine, prompt, reference_greedy, request, target
from tests.engine.test_faults import flaky_model

PROMPT = prompt(71, 12)


class Client:
    """The far side of a running service: sends messages, collects outputs."""

    def __init__(self, engine: Engine) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[StepResult | tuple[str, RequestRefused]] = queue.SimpleQueue()
        service = EngineService(
            engine, self.inbox, self.outbox.put, lambda name, error: self.outbox.put((name, error))
        )
        self.thread = threading.Thread(target=service.run, daemon=True)
        self.thread.start()

    def add(self, item: EngineRequest) -> None:
        self.inbox.put(Add(item))

    def collect(self, num: int) -> dict[str, list[SequenceOutput]]:
        """Outputs by request until `num` requests have ended."""
        outputs: dict[str, list[SequenceOutput]] = {}
        while num:
            result = self.outbox.get(timeout=30)
            assert isinstance(result, StepResult)
            for output in result.outputs:
                outputs.setdefault(output.request_id, []).append(output)
                num -= output.finish_reason is not None
        return outputs

    def stop(self) -> None:
        self.inbox.put(Shutdown())
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture
def expected() -> list[int]:
    return reference_greedy(target(), PROMPT, GREEDY.max_tokens)


@pytest.fixture
def client(expected: list[int]) -> Iterator[Client]:
    client = Client(make_engine(all_drafters({PROMPT: expected})))
    yield client
    if client.thread.is_alive():
        client.stop()


def test_serves_from_idle_again_and_again(client: Client, expected: list[int]) -> None:
    for turn in range(3):
        for policy in ("baseline", "right2", "draft"):
            client.add(request(f"{turn}{policy}", PROMPT, policy=policy))
        assert [tokens(outputs) for outputs in client.collect(3).values()] == [expected] * 3


def test_an_idle_service_waits_for_its_inbox(client: Client, expected: list[int]) -> None:
    """Nothing comes out of an idle service, and it takes no turn until a message comes."""
    turns: list[str] = []
    client.inbox.put(Call(lambda: turns.append("called")))
    client.add(request("a", PROMPT))
    client.collect(1)
    with pytest.raises(queue.Empty):
        client.outbox.get(timeout=0.05)
    assert turns == ["called"]


def test_a_failing_control_message_changes_nothing(
    client: Client, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError("bad state")

    client.inbox.put(Call(fail))
    client.add(request("a", PROMPT))
    assert tokens(client.collect(1)["a"]) == expected
    assert "control message failed" in caplog.text


def test_refusals_and_unknown_aborts(client: Client) -> None:
    client.inbox.put(Abort("nobody"))
    client.add(request("empty", ()))
    refused = client.outbox.get(timeout=30)
    assert isinstance(refused, tuple)
    assert (refused[0], refused[1].param) == ("empty", "prompt")


def test_an_abort_ends_a_long_request(client: Client) -> None:
    client.add(request("long", PROMPT, replace(GREEDY, max_tokens=200)))
    assert isinstance(client.outbox.get(timeout=30), StepResult)
    client.inbox.put(Abort("long"))
    outputs = client.collect(1)["long"]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert len(tokens(outputs)) < 199


def test_shutdown_aborts_what_runs(client: Client) -> None:
    client.add(request("long", PROMPT, replace(GREEDY, max_tokens=200)))
    client.stop()
    assert client.collect(1)["long"][-1].finish_reason is FinishReason.ABORT


def test_a_failed_step_is_an_error_of_its_requests_and_the_service_goes_on(
    expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = flaky_model()
    engine = make_engine(model=model)
    client = Client(engine)

    def fail_next() -> None:
        model.fail_next = RuntimeError("the device is gone")

    client.inbox.put(Call(fail_next))
    client.add(request("a", PROMPT))
    (output,) = client.collect(1)["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "RuntimeError: the device is gone"
    assert "step failed" in caplog.text
    client.add(request("b", PROMPT))
    assert tokens(client.collect(1)["b"]) == expected
    client.stop()
    engine.check_idle()
