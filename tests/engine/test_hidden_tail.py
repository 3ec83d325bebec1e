"""Hidden states as drafters get them: the right ones, whatever the engine did in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchRow, build_batch
from engine.hidden_tail import HiddenTail
from engine.kv.block_manager import new_block_table
from engine.models.interface import LanguageModel
from engine.spec.drafter import DraftContext
from engine.spec.stub import StubDrafter, known_continuations
from engine.spec.tree import DraftTree
from tests.engine.harness import GREEDY, drive, make_engine, prompt, reference_greedy, request, target


@torch.inference_mode()
def reference_hidden(model: LanguageModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Hidden states from one plain forward over a fresh cache, [num_tokens, hidden]."""
    table = new_block_table()
    table.append(0)
    batch = build_batch([BatchRow(token_ids, 0, table, 0)], len(token_ids), model.device)
    return model.forward(batch, model.new_cache(1, len(token_ids)))


class Witness(StubDrafter):
    """A stub that compares the hidden states it is given with those of a forward of its own."""

    num_hidden_rows = 8

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.first_rows: list[int] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        for context in contexts:
            tail, tokens = context.hidden, list(context.token_ids)
            assert tail is not None
            assert context.last_hidden is not None
            assert tail.end == len(tokens) - 1, "all but the newest token are computed"
            rows = tail.rows(tail.first, tail.end)
            due = reference_hidden(target(), tokens[:-1])
            assert torch.allclose(rows, due[tail.first :], atol=1e-4)
            assert torch.equal(context.last_hidden, rows[-1])
            self.first_rows.append(tail.first)
        return super().propose(contexts)


PROMPTS = (prompt(1, 3), prompt(2, 17), (5,) * 30, prompt(5, 40), prompt(5, 40) + prompt(6, 9))


@pytest.mark.parametrize(("num_blocks", "max_batch_tokens"), [(256, 64), (26, 16)])
def test_drafters_get_the_hidden_states_of_the_sequence(num_blocks: int, max_batch_tokens: int) -> None:
    """Accepted and refused drafts, chunked prompts, shared prefixes and, with few blocks, preemptions."""
    known = {ids: reference_greedy(target(), ids, GREEDY.max_tokens) for ids in PROMPTS}
    oracle = known_continuations(known)
    witnesses = {
        name: Witness(oracle, target().spec.vocab_size, num_right, name=name)
        for name, num_right in (("right", None), ("wrong", 0), ("right2", 2))
    }
    engine = make_engine(witnesses, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens)
    for turn in range(2):  # the second time prompts come from the prefix cache
        requests = [
            request(f"{turn}-{i}-{policy}", ids, policy=policy)
            for i, ids in enumerate(PROMPTS)
            for policy in ("baseline", *witnesses)
        ]
        run = drive(engine, requests)
        assert not any(record.drafter_errors for record in run.records)
        if num_blocks < 256:
            assert sum(record.num_preemptions for record in run.records) > 0
    assert all(witness.first_rows for witness in witnesses.values())
    assert max(max(w.first_rows) for w in witnesses.values()) > 0, (
        "rows are missing where a prefix was cached"
    )


def test_nothing_is_kept_where_nobody_reads() -> None:
    oracle = known_continuations({})
    engine = make_engine({"stub": StubDrafter(oracle, target().spec.vocab_size)})
    item = request("a", prompt(1, 9), policy="stub")
    engine.add(item)
    engine.step()
    assert engine._sequences["a"].hidden is None
    engine.abort("a")
    engine.step()


def test_what_is_kept_for_drafters_is_counted_as_theirs() -> None:
    """Beside a stub, which has no memory of its own, `draft_kv` is what a full batch's tails take."""
    vocab_size = target().spec.vocab_size
    assert (
        make_engine({"stub": StubDrafter(known_continuations({}), vocab_size)}).memory_bytes()["draft_kv"]
        == 0
    )
    engine = make_engine({"witness": Witness(known_continuations({}), vocab_size)}, max_sequences=3)
    counted = engine.memory_bytes()["draft_kv"]
    for seed in (1, 2, 3):
        engine.add(request(str(seed), prompt(seed, 9), policy="witness"))
    engine.step()
    tails = [seq.hidden for seq in engine._sequences.values()]
    assert len(tails) == 3
    held = [tail.rows(tail.first, tail.end).untyped_storage().nbytes() for tail in tails if tail is not None]
    assert counted == sum(held) > 0


appends = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=30)


@given(st.integers(1, 6), appends)
def test_a_tail_keeps_the_newest_rows_without_gaps(capacity: int, steps: list[tuple[int, int]]) -> None:
    """steps: (new rows, rows skipped before them)."""
    tail = HiddenTail(capacity)
    held: list[int] = []  # positions, since the last gap
    at = 0
    for num_new, gap in steps:
        at += gap
        tail.append(at, torch.arange(at, at + num_new, dtype=torch.float32)[:, None])
        if num_new:
            held = [] if gap else held
            held += range(at, at + num_new)
        at += num_new
        if not held:
            continue
        if num_new == 0 and gap:
            at -= gap  # nothing was told, so there was no gap either
        assert tail.end == held[-1] + 1
        assert tail.end - tail.first >= min(capacity, len(held))
        assert tail.end - tail.first <= 2 * capacity
        rows = tail.rows(tail.first, tail.end)[:, 0]
        assert rows.tolist() == [float(i) for i in range(tail.first, tail.end)]
        with pytest.raises(IndexError):
            tail.rows(tail.first - 1, tail.end)
