"""Settings of a node: frozen dataclasses, one table of options, one loader.

Settings are validated once, here, and passed down as values; nothing else reads flags, configuration files or
MESHD_* settings.
"""

from meshd.config.loader import load_settings
from meshd.config.options import OPTIONS, Option, cores, parse_control, parse_listen, parse_size
from meshd.config.settings import (
    ClusterSettings,
    ConfigError,
    ConsoleOidc,
    ControlAddress,
    DiskType,
    Durability,
    HttpSettings,
    KubernetesAddress,
    LogFormat,
    NodeSettings,
    StoreSettings,
    TracingSettings,
    TransformSettings,
)

__all__ = [
    "OPTIONS",
    "ClusterSettings",
    "ConfigError",
    "ConsoleOidc",
    "ControlAddress",
    "DiskType",
    "Durability",
    "HttpSettings",
    "KubernetesAddress",
    "LogFormat",
    "NodeSettings",
    "Option",
    "StoreSettings",
    "TracingSettings",
    "TransformSettings",
    "cores",
    "load_settings",
    "parse_control",
    "parse_listen",
    "parse_size",
]
