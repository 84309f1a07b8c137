"""Settings of a node: frozen dataclasses, one table of options, one loader.

Law: validated once, here; passed down as values; nothing else reads flags, files or MESHD_* settings.
"""

from meshd.config.loading import load_settings
from meshd.config.options import OPTIONS, Option
from meshd.config.settings import (
    ClusterSettings,
    ConfigError,
    ControlAddress,
    Durability,
    HttpSettings,
    KubernetesAddress,
    LogFormat,
    NodeSettings,
    StoreSettings,
    TransformSettings,
)
from meshd.config.values import cores, parse_control, parse_listen, parse_size

__all__ = [
    "OPTIONS",
    "ClusterSettings",
    "ConfigError",
    "ControlAddress",
    "Durability",
    "HttpSettings",
    "KubernetesAddress",
    "LogFormat",
    "NodeSettings",
    "Option",
    "StoreSettings",
    "TransformSettings",
    "cores",
    "load_settings",
    "parse_control",
    "parse_listen",
    "parse_size",
]
