"""The configuration in force. Who needs a setting at the time of use reads it here; a reload replaces it."""

from __future__ import annotations

from specgate.config import Config, KeyLimits


class Live:
    """Frozen objects, exchanged as a whole."""

    def __init__(self, config: Config) -> None:
        self.replace(config)

    @property
    def config(self) -> Config:
        """As of now."""
        return self._config

    def replace(self, config: Config) -> None:
        """From now on this one."""
        self._config = config
        self._limits = {key.name: key.limits for key in config.auth.api_keys if key.limits is not None}

    def limits_of(self, key: str) -> KeyLimits:
        """Of the API key of that name; "" is who calls without one."""
        return self._limits.get(key, self._config.admission.per_key)

    @property
    def has_many_keys(self) -> bool:
        """Whether there are keys to be fair between."""
        return len(self._config.auth.api_keys) > 1
