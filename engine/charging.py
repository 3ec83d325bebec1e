"""Whose a step's time was: every sequence is charged its share, so that the shares add up to the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.scheduler import ScheduledStep
from engine.spec.planner import SpecPlan
from engine.spec.tree import DraftTree
from engine.types import BASELINE, SequenceOutput, StepRecord


def charge_step(
    step: ScheduledStep,
    plans: Mapping[str, SpecPlan],
    trees: Sequence[DraftTree],
    record: StepRecord,
    outputs: Sequence[SequenceOutput],
) -> list[SequenceOutput]:
    """Charge the step to its sequences. Returns the outputs, those with statistics brought up to date:
    what a sequence's last step took is known only after it has ended."""
    if not record.num_tokens:
        return list(outputs)
    forward_s = record.forward_s / record.num_tokens
    verify_s = record.verify_s / record.num_tokens
    draft_s = {work.method: work.seconds / work.num_sequences for work in record.drafts if work.num_sequences}
    emitted = {output.request_id: len(output.token_ids) for output in outputs}
    counters = {}
    for index, seq in enumerate(step.sequences):
        num_tokens = step.num_new[index] + len(trees[index])
        shares = (num_tokens * forward_s, num_tokens * verify_s)
        if index >= step.num_decodes:
            seq.counters.charge_prefill(BASELINE, *shares)
        else:
            method = plans[seq.seq_id].method if step.max_draft[index] > 0 else BASELINE
            seq.counters.charge_decode(method, emitted.get(seq.seq_id, 0), draft_s.get(method, 0.0), *shares)
        counters[seq.seq_id] = seq.counters
    return [
        replace(output, stats=replace(output.stats, device=counters[output.request_id].device()))
        if output.stats is not None and output.request_id in counters
        else output
        for output in outputs
    ]
