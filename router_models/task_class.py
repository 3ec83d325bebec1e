"""Which task a request is: linear, calibrated, and able to say why.

Multinomial logistic regression over `task_features`, trained by `router_models.training.fit` and
shipped as arrays with their own scores (`artefacts/task_class.npz`; no pickle, no scikit-learn
needed). Probabilities are tempered on held-out folds; below `MIXED_CONFIDENCE` a request counts
as mixed. `learn_one` only shifts the balance between classes, for callers who name their task.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from router_models.base import State, StateError, check_header, finite, header
from router_models.task_features import NUM_BUCKETS, TaskFeatures, TaskFeaturizer
from router_models.types import TASKS, Effect, Explanation, RequestText, TaskPrediction

_KIND, _VERSION = "task_class", 1
FORMAT_VERSION = 1
MIXED_CONFIDENCE = 0.55
_SHIFT_RATE, _MAX_SHIFT = 0.02, 1.0

Floats = NDArray[np.float64]


class ArtefactError(ValueError):
    """A classifier file that cannot be used."""


@dataclass(frozen=True)
class TaskArtefact:
    """The trained weights. Logits are `(bias + dense @ x + n-grams) / temperature`."""

    bias: Floats  # [tasks]
    dense: Floats  # [dense features, tasks]
    hashed: NDArray[np.int8]  # [buckets, tasks], times `hashed_scale`
    hashed_scale: Floats  # [tasks]
    temperature: float
    meta: dict[str, Any]  # scores, data, versions; JSON

    def save(self, path: Path) -> None:
        """Write a compressed .npz without objects."""
        meta = json.dumps(self.meta | {"format": FORMAT_VERSION, "tasks": TASKS}, ensure_ascii=False)
        np.savez_compressed(
            path,
            bias=self.bias.astype(np.float32),
            dense=self.dense.astype(np.float32),
            hashed=self.hashed,
            hashed_scale=self.hashed_scale.astype(np.float32),
            temperature=np.float64(self.temperature),
            meta=np.frombuffer(meta.encode(), dtype=np.uint8),
        )

    @classmethod
    def load(cls, path: Path | None = None) -> Self:
        """The shipped artefact, or the one at `path`. Raises ArtefactError saying what is wrong."""
        place = path or resources.files("router_models") / "artefacts" / "task_class.npz"
        try:
            with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                meta = json.loads(arrays["meta"].tobytes().decode())
                made = cls(
                    bias=arrays["bias"].astype(np.float64),
                    dense=arrays["dense"].astype(np.float64),
                    hashed=arrays["hashed"],
                    hashed_scale=arrays["hashed_scale"].astype(np.float64),
                    temperature=float(arrays["temperature"]),
                    meta=meta,
                )
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ArtefactError(f"{place}: no task classifier ({error}); train one anew") from error
        if meta.get("format") != FORMAT_VERSION or tuple(meta.get("tasks", ())) != TASKS:
            raise ArtefactError(f"{place}: of another version; train it anew")
        return made

    @property
    def version(self) -> str:
        """Names these weights: a digest made when they were trained."""
        return str(self.meta.get("version", "unknown"))


class TaskClassifier:
    """See the module. Cheap to call, costly to make: make one and keep it."""

    def __init__(self, artefact: TaskArtefact | None = None) -> None:
        self.artefact = artefact if artefact is not None else TaskArtefact.load()
        self._features = TaskFeaturizer()
        names, rows = self._features.dense_names, len(self.artefact.dense)
        if rows != len(names) or self.artefact.hashed.shape != (NUM_BUCKETS, len(TASKS)):
            raise ArtefactError(f"the task classifier has {rows} shape features, this program {len(names)}")
        self._scale: Floats = self.artefact.hashed_scale / self.artefact.temperature
        self._dense: Floats = self.artefact.dense / self.artefact.temperature
        self._bias: Floats = self.artefact.bias / self.artefact.temperature
        self._hashed: NDArray[np.float32] = np.ascontiguousarray(self.artefact.hashed, dtype=np.float32)
        self._shift: Floats = np.zeros(len(TASKS))

    def _logits(self, features: TaskFeatures) -> Floats:
        hashed = features.weights.astype(np.float32) @ self._hashed.take(features.buckets, axis=0)
        logits: Floats = self._bias + self._shift + features.dense @ self._dense + hashed * self._scale
        return logits

    def predict_one(self, x: RequestText) -> TaskPrediction:
        """The most probable task and all probabilities."""
        logits: list[float] = self._logits(self._features.extract(x)).tolist()
        top = max(logits)
        odds = [math.exp(v - top) for v in logits]
        total = sum(odds)
        confidence = 1.0 / total
        probabilities = {task: value / total for task, value in zip(TASKS, odds, strict=True)}
        label = TASKS[logits.index(top)]
        return TaskPrediction(label, confidence, probabilities, confidence < MIXED_CONFIDENCE)

    def explain_one(self, x: RequestText, num_terms: int = 12) -> Explanation:
        """The log-odds of the chosen task against the runner-up: the strongest terms, then the rest.

        N-grams are named by the text they were made from.
        """
        features = self._features.extract(x)
        logits = self._logits(features)
        second, best = np.argsort(logits)[-2:].tolist()
        effects = [Effect("bias", 1.0, c := float(self._bias[best] - self._bias[second]), c)]
        effects += [Effect("learned balance", 1.0, c := float(self._shift[best] - self._shift[second]), c)]
        dense = self._dense[:, best] - self._dense[:, second]
        for i in np.flatnonzero(features.dense).tolist():
            value, weight = float(features.dense[i]), float(dense[i])
            effects.append(Effect(self._features.dense_names[i], value, weight, value * weight))
        rows = self.artefact.hashed[features.buckets] * self._scale
        weights = (rows[:, best] - rows[:, second]).tolist()
        names = (family.name(at) for family in features.families for at in range(family.size))
        summed: dict[str, tuple[float, float]] = {}
        for name, value, weight in zip(names, features.weights.tolist(), weights, strict=True):
            summed[name] = (summed.get(name, (0.0, 0.0))[0] + value, weight)
        effects += [Effect(name, value, w, value * w) for name, (value, w) in summed.items()]
        effects.sort(key=lambda e: -abs(e.effect))
        rest = math.fsum(e.effect for e in effects[num_terms:])
        shown = (*effects[:num_terms], Effect("all other features", 1.0, rest, rest))
        unit = f"log odds of {TASKS[best]} over {TASKS[second]}"
        return Explanation(shown, math.fsum(e.effect for e in shown), unit)

    def learn_one(self, x: RequestText, y: str) -> None:
        """A caller named the task: move the balance between the classes a little towards it."""
        if y not in TASKS:
            raise ValueError(f"unknown task {y!r}; known are {', '.join(TASKS)}")
        probabilities = self.predict_one(x).probabilities
        for i, task in enumerate(TASKS):
            step = _SHIFT_RATE * (float(task == y) - probabilities[task])
            self._shift[i] = max(-_MAX_SHIFT, min(_MAX_SHIFT, float(self._shift[i]) + step))

    def state(self) -> State:
        """The balance learned, and which weights it belongs to. The weights stay in their artefact."""
        shift = dict(zip(TASKS, self._shift.tolist(), strict=True))
        return {**header(_KIND, _VERSION), "artefact": self.artefact.version, "balance": shift}

    @classmethod
    def from_state(cls, state: State, artefact: TaskArtefact | None = None) -> Self:
        """See `Estimator.from_state`. A balance learned on other weights is refused."""
        check_header(state, _KIND, _VERSION)
        model = cls(artefact)
        balance = state.get("balance")
        if state.get("artefact") != model.artefact.version:
            raise StateError(
                f"{_KIND}: learned on weights {state.get('artefact')!r}, not {model.artefact.version!r}"
            )
        if not isinstance(balance, Mapping) or tuple(balance) != TASKS:
            raise StateError(f"{_KIND}: no balance of the known tasks")
        try:
            model._shift = np.array([finite(t, float(v)) for t, v in balance.items()])
        except (TypeError, ValueError) as error:
            raise StateError(f"{_KIND}: {error}") from error
        return model
