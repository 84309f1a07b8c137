"""The one table of settings: name, parser, default. Flags, variables and files know each by one name."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.config.values import (
    at_least,
    choice,
    cores,
    parse_audit,
    parse_control,
    parse_copies,
    parse_days,
    parse_domains,
    parse_listen,
    parse_local,
    parse_name,
    parse_path,
    parse_paths,
    parse_place,
    parse_positive,
    parse_roles,
    parse_seconds,
    parse_sigv2,
    parse_size,
    parse_switch,
    parse_url,
    parse_weight,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
"""From the one that tells most."""


@dataclass(frozen=True, slots=True)
class Option:
    """One setting under its one name: `--name`, `MESHD_NAME`, `name:` in the file."""

    name: str
    parse: Callable[[object], object]
    default: Callable[[], object]

    @property
    def env(self) -> str:
        return "MESHD_" + self.name.replace("-", "_").upper()


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("data-dir", parse_path, lambda: None),
        Option("disk", parse_paths, tuple),
        Option("lost-disk", parse_paths, tuple),
        Option("index-dir", parse_path, lambda: None),
        Option("durability", choice("commit", "relaxed"), lambda: "commit"),
        Option("small-object", parse_size, lambda: 1 << 20),
        Option("segment-size", at_least(1 << 20), lambda: 256 << 20),
        Option("index-map", at_least(16 << 20), lambda: 64 << 30),
        Option("listen", parse_listen, lambda: ("127.0.0.1", 9000)),
        Option("tls-cert", parse_path, lambda: None),
        Option("tls-key", parse_path, lambda: None),
        Option("domain", parse_domains, tuple),
        Option("body-timeout", parse_seconds, lambda: 120.0),
        Option("idle-timeout", parse_seconds, lambda: 75.0),
        Option("head-timeout", parse_seconds, lambda: 20.0),
        Option("max-connections", parse_positive, lambda: 16_384),
        Option("drain-timeout", parse_seconds, lambda: 30.0),
        Option("sigv2", parse_sigv2, lambda: "presigned"),
        Option("hang-timeout", parse_seconds, lambda: 60.0),
        Option("workers", parse_positive, lambda: min(4, cores())),
        Option("transforms", parse_positive, cores),
        Option("transform-memory", at_least(64 << 20), lambda: 2 << 30),
        Option("frame-cache", at_least(1 << 20), lambda: 1 << 30),
        Option("local-frames", parse_local, lambda: True),
        Option("user-ops", parse_switch, lambda: True),
        Option("user-op-seconds", parse_seconds, lambda: 30.0),
        Option("user-op-memory", at_least(64 << 20), lambda: 4 << 30),
        Option("view-cache", at_least(1 << 20), lambda: 10 << 30),
        Option("archive-ratio", parse_positive, lambda: 50),
        Option("cache", at_least(1 << 20), lambda: 0),
        Option("origin-credentials", parse_path, lambda: None),
        Option("origin-patience", parse_seconds, lambda: 3.0),
        Option("lifecycle-interval", parse_seconds, lambda: 900.0),
        Option("stale-uploads", parse_days, lambda: 7),
        Option("keep-documents", parse_days, lambda: 90),
        Option("scrub-interval", parse_seconds, lambda: 14 * 86400.0),
        Option("scrub-rate", at_least(1 << 20), lambda: 64 << 20),
        Option("repair-interval", parse_seconds, lambda: 6 * 3600.0),
        Option("remember-removals", parse_seconds, lambda: 10 * 86400.0),
        Option("users", parse_path, lambda: None),
        Option("audit-log", parse_audit, lambda: None),
        Option("audit-size", parse_size, lambda: 0),
        Option("audit-files", parse_positive, lambda: 10),
        Option("control", parse_control, lambda: None),
        Option("control-ca", parse_path, lambda: None),
        Option("peer-ca", parse_path, lambda: None),
        Option("zone", parse_place, str),
        Option("rack", parse_place, str),
        Option("role", parse_roles, lambda: ("store", "cache", "compute")),
        Option("weight", parse_weight, lambda: 0),
        Option("copies", parse_copies, lambda: 2),
        Option("advertise", parse_url, str),
        Option("lease", parse_seconds, lambda: 5.0),
        Option("down-after", parse_seconds, lambda: 900.0),
        Option("node-id", parse_name, lambda: parse_name(socket.gethostname())),
        Option("region", parse_name, lambda: "us-east-1"),
        Option("log-format", choice("text", "json"), lambda: "text"),
        Option("log-level", choice(*LOG_LEVELS), lambda: "info"),
    )
}
