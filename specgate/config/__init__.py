"""Settings: `schema` says what there is, `loader` reads it, `check` looks at it as a whole."""

from specgate.config.check import is_loopback
from specgate.config.jsonschema import config_json_schema
from specgate.config.limits import AdmissionConfig, KeyLimits
from specgate.config.loader import LOCAL_CONFIG, is_rollout, load_config, load_rollout, parse_config
from specgate.config.schema import (
    AuthConfig,
    CanaryConfig,
    Config,
    CostsConfig,
    DecisionLogConfig,
    FakeConfig,
    KeyConfig,
    LearningConfig,
    LoggingConfig,
    ModelConfig,
    PolicyConfig,
    RequestsConfig,
    ServerConfig,
)
from specgate.config.telemetry import TelemetryConfig, TracingConfig

__all__ = [
    "LOCAL_CONFIG",
    "AdmissionConfig",
    "AuthConfig",
    "CanaryConfig",
    "Config",
    "CostsConfig",
    "DecisionLogConfig",
    "FakeConfig",
    "KeyConfig",
    "KeyLimits",
    "LearningConfig",
    "LoggingConfig",
    "ModelConfig",
    "PolicyConfig",
    "RequestsConfig",
    "ServerConfig",
    "TelemetryConfig",
    "TracingConfig",
    "config_json_schema",
    "is_loopback",
    "is_rollout",
    "load_config",
    "load_rollout",
    "parse_config",
]
