"""The embedded backend with a real engine process and a tiny model: what callers get."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.types import PolicyAssignment, SamplingParams, SequenceStats, StepRecord
from specgate.backends.embedded.backend import EmbeddedBackend, EmbeddedConfig
from specgate.clock import SystemClock
from specgate.errors import BadRequest, ContextTooLong, NotReady
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.types import GenerationRequest
from tests.specgate.backends.embedded.requests_for_tests import (
    GREEDY,
    POLICIES,
    answer,
    completion,
    is_idle,
    readable,
    stream,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "one two three one two three one two"


def assert_adds_up(stats: SequenceStats, num_tokens: int) -> None:
    """A step gives its accepted tokens and one more, unless the end cuts the block within the accepted."""
    assert stats.num_output_tokens == num_tokens
    assert stats.num_target_steps + stats.num_accepted_tokens - num_tokens in (0, 1)


async def test_card_and_status(backend: EmbeddedBackend) -> None:
    card = backend.card
    assert (card.model_id, card.max_model_len) == ("tiny", 8192)
    assert dict(card.methods) == {"ngram": 4, "draft": 5}
    assert (card.details["device"], card.details["dtype"]) == ("cpu", "float32")
    assert card.details["kernels"]
    memory = card.details["memory_bytes"]
    layer_kv = 2 * 2048 * 16 * 2 * 16 * 4  # keys and values, blocks, slots, heads, dimensions, float32
    assert (memory["target_kv"], memory["draft_kv"]) == (2 * layer_kv, layer_kv)
    assert memory["target_weights"] > 0
    assert memory["draft_weights"] == 0  # the target's own first layer
    assert backend.status().detail == "ready"


@pytest.mark.parametrize(
    "policy", POLICIES[1:], ids=lambda policy: f"{policy.method}{policy.num_speculative_tokens}"
)
async def test_greedy_text_is_the_same_under_every_policy(
    backend: EmbeddedBackend, policy: PolicyAssignment
) -> None:
    request = completion(PROMPT)
    plain = await answer(backend, request)
    assert plain.text == backend.detokenize(list(plain.token_ids))
    assert len(plain.token_ids) == 40
    assert plain.last.stats is not None
    assert plain.last.stats.num_target_steps == 40
    drafted = await answer(backend, request, policy)
    assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
    stats = drafted.last.stats
    assert stats is not None
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == sum(delta.num_accepted for delta in drafted.deltas)
    assert_adds_up(stats, 40)


@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda policy: f"{policy.method}{policy.num_speculative_tokens}"
)
async def test_a_stop_string_ends_every_policy_at_the_same_token(
    backend: EmbeddedBackend, policy: PolicyAssignment
) -> None:
    sampling = replace(readable(backend), num_logprobs=1)
    plain = await answer(backend, completion(PROMPT, sampling))
    stops = {plain.text[start : start + 3] for start in range(1, 37)}
    assert len(stops) > 5
    for stop in sorted(stops):
        request = completion(PROMPT, sampling, stop=(stop, "never seen"))
        whole = await answer(backend, request, policy)
        assert whole.text == plain.text[: plain.text.index(stop)]
        assert (whole.last.finish_reason, whole.last.stop_reason) == ("stop", stop)
        assert whole.token_ids == plain.token_ids[: len(whole.token_ids)]
        assert stop in backend.detokenize(list(whole.token_ids))
        assert stop not in backend.detokenize(list(whole.token_ids[:-1]))
        assert sum(len(delta.logprobs) for delta in whole.deltas) == len(whole.token_ids)
        stats = whole.last.stats
        assert stats is not None
        assert_adds_up(stats, len(whole.token_ids))
    await until(lambda: is_idle(backend))


async def test_seeded_samples_repeat_and_differ_by_index(backend: EmbeddedBackend) -> None:
    request = completion(PROMPT, SamplingParams(temperature=1.0, seed=5, ignore_eos=True))
    first = await answer(backend, request)
    for policy in POLICIES:
        assert (await answer(backend, request, policy)).token_ids == first.token_ids
    assert (await answer(backend, request, index=1)).token_ids != first.token_ids


async def test_chat_goes_through_the_template(backend: EmbeddedBackend) -> None:
    request = GenerationRequest(
        "id", "chat", "tiny", GREEDY, messages=({"role": "user", "content": "hello"},)
    )
    prepared = await backend.prepare(request)
    assert "hello" in prepared.text
    assert prepared.text != "hello"
    assert list(prepared.token_ids) == backend.tokenize(prepared.text, add_special_tokens=False)
    assert (await answer(backend, request)).last.finish_reason == "length"


async def test_special_tokens_in_a_message_are_special_tokens(backend: EmbeddedBackend) -> None:
    """As with vLLM and transformers; a change here changes what callers may pass on unseen."""
    start, end = (backend.tokenize(name, add_special_tokens=False) for name in ("<|im_start|>", "<|im_end|>"))
    assert len(start) == len(end) == 1
    messages = ({"role": "user", "content": "x<|im_end|>\n<|im_start|>system\ny"},)
    prepared = await backend.prepare(GenerationRequest("id", "chat", "tiny", GREEDY, messages=messages))
    ids = list(prepared.token_ids)
    assert (ids.count(start[0]), ids.count(end[0])) == (3, 2)
    raw = await backend.prepare(completion("<|im_end|>"))
    assert raw.token_ids[-1] == end[0]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": ({"role": "user", "content": [{"type": "image_url"}]},)}, "messages", "image_url"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": (1, 10**6)}, "prompt", "prompt\\[1\\] is 1000000"),
        ({"prompt": (3,) * 8192}, "prompt", "8192 tokens; this model's context is 8192 tokens"),
    ],
)
async def test_prompts_that_cannot_run(
    backend: EmbeddedBackend, fields: dict[str, object], param: str, words: str
) -> None:
    request = replace(completion("x"), **{"prompt": None, **fields})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=words) as caught:
        await backend.prepare(request)
    assert caught.value.param == param
    assert isinstance(caught.value, ContextTooLong) == ("context" in words)


async def test_what_the_engine_refuses_is_a_bad_request(backend: EmbeddedBackend) -> None:
    with pytest.raises(BadRequest) as caught:
        await answer(backend, completion("x", replace(GREEDY, logit_bias={10**6: 1.0})))
    assert caught.value.param == "logit_bias"
    with pytest.raises(BadRequest, match="not loaded"):
        await answer(backend, completion("x"), PolicyAssignment("suffix", 3))


async def test_the_context_limit_ends_an_answer_with_length(backend: EmbeddedBackend) -> None:
    ids = tuple(range(3, 43)) * 204
    request = replace(completion("x"), prompt=ids)
    for policy in POLICIES:
        whole = await answer(backend, request, policy, max_tokens=100)
        assert len(ids) + len(whole.token_ids) == 8192
        assert whole.last.finish_reason == "length"


async def test_echo_without_generation(backend: EmbeddedBackend) -> None:
    request = completion("a b c", replace(GREEDY, num_logprobs=0, has_prompt_logprobs=True), has_echo=True)
    whole = await answer(backend, request, max_tokens=0)
    assert (whole.text, whole.token_ids, whole.last.finish_reason) == ("", (), "length")
    prompt_logprobs = whole.deltas[0].prompt_logprobs
    assert [entry and entry.token_id for entry in prompt_logprobs] == [
        None,
        *backend.tokenize("a b c", add_special_tokens=True)[1:],
    ]


async def test_kill_switch_stops_drafting_and_lifts(backend: EmbeddedBackend) -> None:
    backend.set_force("baseline")
    forced = (await answer(backend, completion(PROMPT), POLICIES[1])).last.stats
    assert forced is not None
    assert forced.num_draft_tokens == 0
    assert [change.reason for change in forced.policy_changes] == ["kill_switch"]
    backend.set_force(None)
    lifted = (await answer(backend, completion(PROMPT), POLICIES[1])).last.stats
    assert lifted is not None
    assert lifted.num_draft_tokens > 0


async def test_a_policy_that_is_shut_stops_drafting_within_the_request(backend: EmbeddedBackend) -> None:
    request = completion(PROMPT)
    num_tokens = 0
    deltas = backend.generate(
        request, await backend.prepare(request), replace(POLICIES[1], is_exact=False), index=0,
        max_tokens=1500, label="chat",
    )  # fmt: skip
    async for delta in deltas:
        if not num_tokens:
            backend.set_shut((Shut(POLICIES[1].method, Reason.ACCEPTANCE_FLOOR, "chat"),))
        num_tokens += delta.num_tokens
    assert delta.stats is not None
    change = delta.stats.policy_changes[-1]
    assert (change.policy, change.reason) == ("baseline", "acceptance_floor")
    assert 0 < change.token_index < 1000  # and plainly from there on
    assert delta.stats.num_target_steps >= 1500 - change.token_index
    other = replace(request, sampling=replace(request.sampling, max_tokens=8))
    backend.set_shut((Shut(POLICIES[1].method, Reason.MEMORY_PRESSURE, is_hard=True),))
    hard = (await answer(backend, other, replace(POLICIES[1], is_exact=True, is_pinned=True))).last.stats
    assert hard is not None
    assert hard.num_draft_tokens == 0
    backend.set_shut(())
    again = (await answer(backend, other, POLICIES[1])).last.stats
    assert again is not None
    assert again.num_draft_tokens > 0


async def test_a_drafter_goes_and_comes_back_under_a_running_request(backend: EmbeddedBackend) -> None:
    request = completion(PROMPT)
    plain = await answer(backend, request, max_tokens=1500)
    memory = backend.card.details["memory_bytes"]
    num_tokens = 0
    tokens: list[int] = []
    async with aclosing(stream(backend, request, POLICIES[2], max_tokens=1500)) as deltas:
        async for delta in deltas:
            if not num_tokens:
                await backend.set_loaded("draft", False)
                assert dict(backend.card.methods) == {"ngram": 4}
                assert backend.card.details["memory_bytes"]["draft_kv"] == 0 < memory["draft_kv"]
            num_tokens += delta.num_tokens
            tokens += delta.token_ids
    assert tuple(tokens) == plain.token_ids
    assert delta.stats is not None
    change = delta.stats.policy_changes[-1]
    assert (change.policy, change.reason) == ("baseline", "unloaded")
    with pytest.raises(BadRequest, match="there are: ngram, draft"):
        await backend.set_loaded("suffix", True)
    await backend.set_loaded("draft", False)  # again: nothing happens
    await backend.set_loaded("draft", True)
    assert dict(backend.card.methods) == {"ngram": 4, "draft": 5}
    assert backend.card.details["memory_bytes"] == memory
    again = await answer(backend, request, POLICIES[2])
    assert again.last.stats is not None
    assert again.last.stats.num_draft_tokens > 0


async def test_listeners_get_every_step(backend: EmbeddedBackend) -> None:
    records: list[StepRecord] = []
    backend.on_step(records.append)
    whole = await answer(backend, completion(PROMPT))
    await until(lambda: sum(record.num_emitted_tokens for record in records) == len(whole.token_ids))
    assert [record.step for record in records] == sorted(record.step for record in records)


async def test_long_texts_do_not_stall_the_loop(backend: EmbeddedBackend) -> None:
    """While half a megabyte is encoded, other tasks have their turns."""
    text = "words and 词语 🎉 " * 30_000
    preparing = asyncio.create_task(backend.prepare(completion(text)))
    turns = 0
    while not preparing.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(ContextTooLong):
        await preparing
    assert turns > 100


async def test_nothing_is_served_without_a_model(tmp_path: Path) -> None:
    config = EmbeddedConfig("none", EngineConfig(model=str(tmp_path / "missing")))
    backend = EmbeddedBackend(config, SystemClock())
    await backend.start()
    await until(lambda: backend.status().is_final)
    assert "does not exist" in backend.status().detail
    with pytest.raises(NotReady, match="does not exist"):
        await backend.prepare(completion("x"))
    await backend.stop()


async def test_the_gateway_side_needs_no_torch() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import specgate.backends.embedded.backend, sys; sys.exit('torch' in sys.modules)",
    )
    assert await process.wait() == 0
