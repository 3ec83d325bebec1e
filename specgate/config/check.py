"""Faults that only show when several settings are seen together."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from specgate.config.schema import Config, ModelConfig
from specgate.config.upstream import pool_faults


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`."""
    if host in ("localhost", "127.0.0.1", "::1"):  # asked for every request without a key
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def cross_check(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (path, message) for each fault."""
    if not config.models:
        yield "models", "at least one model is needed"
    seen: set[str] = set()
    for index, model in enumerate(config.models):
        if model.id in seen:
            yield f"models.{index}.id", f"{model.id!r} is already taken"
        seen.add(model.id)
        yield from _check_model(f"models.{index}", model)
        yield from _check_imposed(f"models.{index}.engine", model, config.benching)
    auth, host = config.auth, config.server.host
    if not is_loopback(host) and not auth.api_keys:
        yield "auth.api_keys", f"server.host {host} can be reached from outside: at least one key is needed"
    if is_loopback(host) and not auth.keyless_on_loopback and not auth.api_keys:
        yield "auth.api_keys", "nobody could call: add a key, or set auth.keyless_on_loopback: true"
    for group, keys in (("api_keys", auth.api_keys), ("admin_keys", auth.admin_keys)):
        names = [key.name for key in keys]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"auth.{group}.{index}.name", f"{name!r} is already taken"
    for index, key in enumerate(auth.admin_keys):
        if key.limits is not None:
            yield f"auth.admin_keys.{index}.limits", "does nothing: limits are for API keys"
    shared = {key.sha256 for key in auth.api_keys} & {key.sha256 for key in auth.admin_keys}
    if shared:
        yield "auth.admin_keys", "an admin key must not be an API key as well"


def _check_model(path: str, model: ModelConfig) -> Iterator[tuple[str, str]]:
    sections = {"embedded": "engine", "openai_http": "openai_http", "fake": "fake"}
    for backend, section in sections.items():
        if backend != model.backend and getattr(model, section) is not None:
            yield f"{path}.{section}", f"does nothing with backend: {model.backend}"
    if model.backend == "openai_http" and model.openai_http is None:
        yield f"{path}.openai_http", "is required with backend: openai_http: name its pools"
    for at, message in pool_faults(model.openai_http) if model.openai_http is not None else ():
        yield f"{path}.openai_http.{at}", message
    for method, depth in model.fake.methods.items() if model.fake else ():
        if method in ("auto", "baseline") or depth < 1:
            yield f"{path}.fake.methods.{method}", "a method has a name of its own and a depth of at least 1"
    engine = model.engine
    if engine is None:
        return
    if engine.ngram is not None and engine.ngram.prompt_lookup_min > engine.ngram.prompt_lookup_max:
        yield f"{path}.engine.ngram.prompt_lookup_min", "is above prompt_lookup_max"
    draft = engine.draft_model
    if draft is not None and (draft.source is None) == (draft.layers_of_target is None):
        yield f"{path}.engine.draft_model", "needs exactly one of source and layers_of_target"
    if engine.hybrid is not None and draft is None:
        yield f"{path}.engine.hybrid", "needs draft_model: the draft model is what it drafts with elsewhere"


def _check_imposed(path: str, model: ModelConfig, is_benching: bool) -> Iterator[tuple[str, str]]:
    imposed = None if model.engine is None else model.engine.imposed
    if model.engine is None or imposed is None:
        return
    if not is_benching:
        yield f"{path}.imposed", "an acceptance no drafter earned: only for benches, with serve --bench"
    if model.engine.draft_model is None:
        yield f"{path}.imposed", "needs draft_model: its forwards are what the imposed drafts cost"
    if not imposed.acceptance:
        yield f"{path}.imposed.acceptance", "needs at least one probability"
    for position, chance in enumerate(imposed.acceptance):
        if not 0 <= chance <= 1:
            yield f"{path}.imposed.acceptance.{position}", f"is {chance:g}; must be between 0 and 1"
