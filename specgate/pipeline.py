"""One request's life, top to bottom: the file to read first.

 1 arrive     api/ has parsed and checked the body and stamped the arrival; here: may it run at all?
 2 admit      a bounded queue per model; the deadline already counts
 3 describe   the prompt is encoded; task and shape are looked at
 4 predict    task, answer length, acceptance so far, load
 5 decide     policy/decide.py: a policy, and the reason for it
 6 submit     one stream per answer from the backend
 7-10         schedule, draft, forward, verify: inside the engine, once per step
11 emit       deltas to api/, which turns them into JSON or SSE
12 learn      the outcome goes to metrics, decision log and learner, exactly once

Leaving `Pipeline.run` in any way (client gone, deadline, error) closes the backend's streams, which
aborts the work there, and gives the slots back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from specgate.admission import Admission, Entrant
from specgate.backends.base import Backend, ModelCard
from specgate.clock import Clock
from specgate.consistency import ConsistencyChecker
from specgate.errors import (
    ApiError,
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    NotFound,
    NotReady,
    UnsupportedParameter,
)
from specgate.estimate import Estimator
from specgate.generation import Generation, Prompt, Times
from specgate.guarding import PROBE_STEPS, Guarding, as_control
from specgate.learning import Learner
from specgate.live import Live
from specgate.load import LoadMeter
from specgate.policy.decide import Facts, unknown_policy
from specgate.policy.guards import Openings
from specgate.policy.overlay import decide_in_arm
from specgate.policy.reasons import Reason
from specgate.policy.shut import Shut
from specgate.rate_limits import RateLimits, Reservation, answer_ceiling, estimated_tokens
from specgate.rollouts import Rollouts
from specgate.telemetry.recorder import Telemetry
from specgate.types import Decision, GenerationRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model with everything that belongs to it alone."""

    id: str
    backend: Backend
    admission: Admission
    meter: LoadMeter
    learner: Learner
    guards: Guarding
    checker: ConsistencyChecker


@dataclass(slots=True)
class Switches:
    """What an operator sets while the server runs."""

    forced_policy: str | None = None  # the kill switch
    is_draining: bool = False  # by hand, and taken back by hand
    is_stopping: bool = False  # for good
    is_hurried: bool = False  # asked twice to end: running requests are not waited for

    @property
    def takes_nothing(self) -> bool:
        """New requests are refused."""
        return self.is_draining or self.is_stopping


class Pipeline:
    """Runs requests. Holds no state of its own beside how many are open."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        live: Live,
        switches: Switches,
        estimator: Estimator,
        telemetry: Telemetry,
        clock: Clock,
        rollouts: Rollouts,
        rates: RateLimits,
    ) -> None:
        self.models = models
        self.switches = switches
        self.num_open = 0
        self._running: set[Generation] = set()
        self._live = live
        self._rates = rates
        self._estimator = estimator
        self._telemetry = telemetry
        self._clock = clock
        self._rollouts = rollouts

    @asynccontextmanager
    async def run(self, request: GenerationRequest, arrival_s: float) -> AsyncIterator[Generation]:
        """The life of one request. Raises an ApiError if it may not run; the block reads
        `Generation.deltas()` and may be left at any moment."""
        left_s = self._live.config.requests.deadline_s - (self._clock.monotonic() - arrival_s)
        ends_at = asyncio.get_running_loop().time() + left_s
        generation: Generation | None = None
        reservation: Reservation | None = None
        self.num_open += 1
        try:
            async with AsyncExitStack() as stack:
                model = self._arrive(request)  # 1
                reservation = self._rates.take(request.tenant, estimated_tokens(request))
                # Not before: callers that are refused and try again are no load.
                model.meter.arrived(_num_answers(request))
                who = Entrant(request.tenant, request.priority, left_s)
                async with _deadline(ends_at):
                    await stack.enter_async_context(model.admission.slot(_num_answers(request), who))  # 2
                    times = Times(arrival_s, self._clock.monotonic(), ends_at)
                    prompts = await self._encode(model, request)  # 3
                num_prompt_tokens = sum(prompt.prepared.num_tokens for prompt in prompts)
                reservation.hold(num_prompt_tokens + answer_ceiling(request))
                decision = self._settle(model, request, prompts[0].prepared.num_tokens)  # 4, 5
                model.learner.decided(decision)
                generation = Generation(request, decision, prompts, model.backend, times, self._clock)  # 6
                generation.priced_by(partial(self._telemetry.cost, details=model.backend.card.details))
                generation.report_wait(model.meter.admitted(generation.admission_wait_s))
                if model.checker.selects(request, decision):
                    generation.keep_tokens()
                self._running.add(generation)
                try:
                    yield generation  # 7 to 11
                except ApiError as error:
                    generation.note_failure(error)
                    raise
                except (asyncio.CancelledError, ConnectionError):
                    generation.note_left()
                    raise
                finally:
                    self._running.discard(generation)
                    try:
                        await generation.close()
                    finally:
                        self._learn(model, generation)  # 12
        finally:
            self.num_open -= 1
            if reservation is not None:
                reservation.set_to(0 if generation is None else generation.num_tokens)
            if generation is None:  # then it is an exception that leads here
                self._count_undecided(request, sys.exception())

    def refusal(self, tenant: str) -> ApiError | None:
        """Why any request of this key is refused now, whatever its body says: this is how requests are
        turned away for a fraction of what reading them takes."""
        if self.switches.takes_nothing:
            return _draining()
        if (over := self._rates.refusal(tenant)) is not None:
            return over
        who = Entrant(tenant, self._live.limits_of(tenant).priority, self._live.config.requests.deadline_s)
        problems = []
        for model in self.models.values():
            if (full := model.admission.refusal(who)) is None:
                return None
            problems.append(full)
        for model, full in zip(self.models.values(), problems, strict=True):
            model.admission.turned_away(full)
        return next(iter(problems), None)

    def cut_off(self, error: ApiError) -> None:
        """End everything that still runs, with this error."""
        for generation in self._running:
            generation.cut_off(error)

    def _settle(self, model: ServedModel, request: GenerationRequest, num_prompt_tokens: int) -> Decision:
        """Decide for a request that will run. Closed doors are told of it: it may be a probe."""
        decision, openings = self.decide(model, request, num_prompt_tokens)
        opening = openings.probes.get(decision.policy)
        is_fixed = decision.reason == Reason.OVERRIDE or decision.is_pinned
        if is_fixed and (opening is None or not opening.is_hard):
            return decision  # what is asked for gets past other doors without being their probe
        if model.guards.decided(openings, decision.policy):
            hold_steps = max(decision.hold_steps, PROBE_STEPS)
            return replace(decision, is_probe=True, hold_steps=hold_steps)
        credit_s = model.learner.control_credit_s
        if request.overrides.may_probe and model.guards.takes_control(decision, num_prompt_tokens, credit_s):
            return as_control(decision)
        return decision

    def decide(
        self, model: ServedModel, request: GenerationRequest, num_prompt_tokens: int
    ) -> tuple[Decision, Openings]:
        """Steps 4 and 5, and the doors it met. Runs nothing and changes nothing."""
        card, learner, sampling = model.backend.card, model.learner, request.sampling
        room = sampling.max_tokens  # 2**31 - 1 if the caller gave no limit
        if not request.has_explicit_max_tokens and card.max_model_len:
            room = max(min(room, card.max_model_len - num_prompt_tokens), 1)
        task = self._estimator.task(request)
        load = model.meter.view(model.admission, model.backend.load())
        model.guards.look(load)
        openings = model.guards.openings(task.scope, may_probe=request.overrides.may_probe)
        facts = Facts(
            task=task,
            length=learner.length(request, task, num_prompt_tokens, room),
            load=load,
            methods=card.methods,
            num_prompt_tokens=num_prompt_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            known=learner.experience(task, num_prompt_tokens, load),
            overrides=request.overrides,
            forced=self.switches.forced_policy,
            shut={**openings.shut, **_closed(model.backend.status().closed)},
            baseline_only=("echo with logprobs",) if sampling.has_prompt_logprobs else (),
            unsupported=request.unsupported,
        )
        arm = self._rollouts.assign(request, task.label)
        return decide_in_arm(facts, self._live.config.policy, arm), openings

    async def explain(self, model: ServedModel, request: GenerationRequest) -> Decision:
        """What would be decided now. The prompt is encoded if it can be, else its length is guessed."""
        try:
            single = replace(request, more_prompts=()) if request.more_prompts else request
            num_prompt_tokens = (await model.backend.prepare(single)).num_tokens
        except ApiError:
            num_prompt_tokens = max(1, len(request.user_text) // 4)
        return self.decide(model, request, num_prompt_tokens)[0]

    def find(self, model_id: str) -> ServedModel:
        """The model of that name. Raises NotFound naming those there are."""
        model = self.models.get(model_id)
        if model is None:
            known = ", ".join(self.models)
            raise NotFound(
                f"The model {model_id[:200]!r} does not exist; served are: {known}.",
                "model",
                code="model_not_found",
            )
        return model

    def count_refused(self, endpoint: str, error: ApiError) -> None:
        """A body that did not become a request, or was not looked at."""
        is_sure = len(self.models) == 1 and error.status >= 429  # for which model it was
        self._telemetry.refused(next(iter(self.models)) if is_sure else "none", endpoint, error)

    def _arrive(self, request: GenerationRequest) -> ServedModel:
        if self.switches.takes_nothing:
            raise _draining()
        model = self.find(request.model)
        status = model.backend.status()
        if not status.is_ready:
            raise NotReady(f"The model is not ready: {status.detail}.")
        if request.unsupported:
            name = request.unsupported[0]
            raise UnsupportedParameter(
                f"{name!r} is understood, but generating with it is not supported yet.", name
            )
        if wrong := unknown_policy(request.overrides, model.backend.card.methods):
            raise BadRequest(f"The {wrong}", "specgate.policy", code="unknown_policy")
        _check_token_ids(request, model.backend.card)
        return model

    async def _encode(self, model: ServedModel, request: GenerationRequest) -> tuple[Prompt, ...]:
        prompts = []
        for text in (request.prompt, *request.more_prompts):
            single = replace(request, prompt=text, more_prompts=()) if request.more_prompts else request
            prepared = await model.backend.prepare(single)
            if model.backend.card.is_relay:  # whether it fits is for the model's servers to say
                prompts.append(Prompt(request, prepared, request.sampling.max_tokens))
                continue
            context, num_prompt = model.backend.card.max_model_len, len(prepared.token_ids)
            room = context - num_prompt
            max_tokens = request.sampling.max_tokens
            if not request.has_explicit_max_tokens:
                max_tokens = min(max_tokens, room)
            if max_tokens > room:
                raise ContextTooLong(
                    f"The context is {context} tokens: {num_prompt} of the prompt and {max_tokens} asked for"
                    f" are too many. At most {room} can be asked for.",
                    "max_tokens",
                )
            prompts.append(Prompt(single, prepared, max_tokens))
        return tuple(prompts)

    def _learn(self, model: ServedModel, generation: Generation) -> None:
        outcome = generation.outcome()
        self._telemetry.finished(outcome, generation.admission_wait_s, model.backend.card.details)
        if not generation.request.overrides.learn:
            return
        model.learner.learn(outcome)
        model.guards.finished(outcome)
        self._rollouts.finished(outcome)
        if outcome.outcome == "ok":
            model.checker.offer(generation)

    def _count_undecided(self, request: GenerationRequest, error: BaseException | None) -> None:
        model = request.model if request.model in self.models else "none"
        if isinstance(error, ApiError):
            self._telemetry.refused(model, request.endpoint, error)
        else:
            self._telemetry.undecided(model, request.endpoint, error)


def _draining() -> Draining:
    return Draining("The server is draining and takes no new requests.")


@asynccontextmanager
async def _deadline(ends_at: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(ends_at):
            yield
    except TimeoutError:
        raise DeadlineExceeded("The request's deadline passed before it could start.") from None


def _closed(policies: Mapping[str, str]) -> dict[str, Shut]:
    """What the backend itself cannot run now: nobody gets past."""
    return {
        policy: Shut(policy, Reason.DRAFTER_ERROR, why=f"drafter_error: {why}", is_hard=True)
        for policy, why in policies.items()
    }


def _num_answers(request: GenerationRequest) -> int:
    return request.n * (1 + len(request.more_prompts))


def _check_token_ids(request: GenerationRequest, card: ModelCard) -> None:
    """Ids that the model has no token for."""
    if card.vocab_size is None:
        return
    for name, ids in (
        ("logit_bias", request.sampling.logit_bias), ("stop_token_ids", request.sampling.stop_token_ids),
    ):  # fmt: skip
        for token_id in ids:
            if token_id >= card.vocab_size:
                raise BadRequest(
                    f"{name!r} has {token_id}; token ids of this model are 0 to {card.vocab_size - 1}.", name
                )
