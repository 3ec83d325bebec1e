"""A request as the router models see it, and the task read from it. No torch, no I/O after start."""

from __future__ import annotations

from router_models.request_text import from_messages, from_prompt
from router_models.task_class import TaskClassifier
from router_models.types import TASKS, RequestText
from specgate.types import GenerationRequest, TaskEstimate


def request_text(request: GenerationRequest) -> RequestText:
    """The request as text. A prompt that came as token ids reads as empty."""
    max_tokens = request.sampling.max_tokens if request.has_explicit_max_tokens else None
    if request.messages is not None:
        has_format = (request.response_format or {}).get("type", "text") != "text"
        return from_messages(request.messages, len(request.tools), has_format, max_tokens)
    text = request.prompt if isinstance(request.prompt, str) else ""
    return from_prompt(text, request.suffix, max_tokens)


class LearnedEstimator:
    """The trained classifier as a `specgate.estimate.Estimator`."""

    def __init__(self, classifier: TaskClassifier | None = None) -> None:
        """`classifier`: the shipped one by default. Raises `router_models.task_class.ArtefactError`."""
        self._classifier = classifier if classifier is not None else TaskClassifier()
        self._classifier.predict_one(from_prompt("Hello", None, None))  # tables are made at first use

    def task(self, request: GenerationRequest) -> TaskEstimate:
        """The task with probabilities; an override is certain."""
        if (label := request.overrides.task) is not None:
            return TaskEstimate(label, 1.0, {task: float(task == label) for task in TASKS})
        found = self._classifier.predict_one(request_text(request))
        return TaskEstimate(found.label, found.confidence, found.probabilities, found.is_mixed)
