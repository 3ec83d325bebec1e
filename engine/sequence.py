"""One request inside the engine: its tokens, how far they are computed, and its counters.

Plain Python: the scheduler works on these and holds no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv.block_manager import new_block_table
from engine.stats import SequenceCounters
from engine.types import BASELINE, EngineRequest, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from engine.hidden_tail import HiddenTail
    from engine.spec.verify import SamplingState


class Sequence:
    """The state of one request, owned by the engine's thread.

    The one invariant: `num_computed` tokens have their keys and values in the cache, and
    `num_computed < len(token_ids)` always, since the newest token still has to pass through the
    target. When exactly one token is left the sequence *decodes*; with more it *prefills*.
    """

    __slots__ = (
        "arrived_s",
        "block_hashes",
        "block_table",
        "counters",
        "drafters",
        "final_ids",
        "first_scheduled_s",
        "hidden",
        "judged",
        "last_drafted",
        "limit",
        "method",
        "num_committed_blocks",
        "num_computed",
        "order",
        "output_token_ids",
        "prompt_length",
        "prompt_logprobs",
        "request",
        "sampling",
        "seq_id",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        arrival: int,
        arrived_s: float,
        eos_token_ids: frozenset[int],
        context_limit: int,
    ) -> None:
        params = request.sampling
        self.request = request
        self.seq_id = request.request_id
        self.order = (request.priority, arrival)  # lower is served first and preempted last
        self.token_ids = list(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.prompt_length = len(request.prompt_token_ids)
        self.limit = min(self.prompt_length + params.max_tokens, context_limit)  # tokens it may grow to
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= eos_token_ids
        # Where a grammar lets an end stand against min_tokens or ignore_eos, nothing else may follow.
        self.final_ids = frozenset() if request.grammar is None else eos_token_ids
        self.num_computed = 0
        self.block_table = new_block_table()
        self.block_hashes: list[bytes] = []  # names of the full blocks of token_ids, as far as needed
        self.num_committed_blocks = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None  # None: not asked for
        if params.has_prompt_logprobs:
            self.prompt_logprobs = [None]  # nothing comes before the first token
        self.sampling: SamplingState | None = None  # set by the engine; its lists are this sequence's own
        self.method = request.policy.method  # the policy in force, as last named by the planner
        self.drafters: set[str] = set()  # drafters that hold state for this sequence
        self.last_drafted = (BASELINE, 0, 0)  # of the step before: method, draft tokens, accepted
        self.arrived_s = arrived_s
        self.first_scheduled_s: float | None = None
        self.hidden: HiddenTail | None = None  # the engine's, where a drafter reads hidden states
        self.judged: dict[str, int] = {}  # by drafter: up to which length is known what it would have done
        self.counters = SequenceCounters()

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be passed through the target, at least 1."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True when only the newest token is left to compute."""
        return len(self.token_ids) - self.num_computed == 1

    @property
    def num_remaining(self) -> int:
        """Output tokens until max_tokens or the context limit."""
        return self.limit - len(self.token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while logprobs of the prompt were asked for and are not all there."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    def queue_wait_s(self, now_s: float) -> float:
        """Added to first scheduled step; as of now, while it still waits."""
        return (now_s if self.first_scheduled_s is None else self.first_scheduled_s) - self.arrived_s

    def append(self, token_ids: tuple[int, ...]) -> None:
        """Add output tokens."""
        self.token_ids.extend(token_ids)
        self.output_token_ids.extend(token_ids)

    def forget_computed(self) -> None:
        """Start over after a preemption: everything is computed again, nothing emitted is lost."""
        self.num_computed = 0
        self.num_committed_blocks = 0
        if self.hidden is not None:
            self.hidden.clear()
        if self.needs_prompt_logprobs:
            self.prompt_logprobs = [None]

    def cut(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """How many of the next `token_ids` are kept, and why the sequence ends there, if it does.

        The earliest event in token order wins; on the last token there is room for, a stop
        token counts as STOP. The stop token itself is kept (the reader drops its text).
        """
        num_room = self.num_remaining
        if self.stop_ids or self.final_ids:
            num_masked = self.request.sampling.min_tokens - len(self.output_token_ids)
            for index, token_id in enumerate(token_ids[:num_room]):
                if token_id in self.final_ids or (token_id in self.stop_ids and index >= num_masked):
                    return index + 1, FinishReason.STOP
        if len(token_ids) >= num_room:
            return num_room, FinishReason.LENGTH
        return len(token_ids), None
