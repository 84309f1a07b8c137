"""Options: the one table of settings (name, parser, default) and the parsers of single values.

Flags, environment variables and configuration files use the same name and the same parser. A parser's
ValueError says only what would be accepted; `loader` adds the setting and its source.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from meshd.config.settings import ControlAddress, KubernetesAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}


def cores() -> int:
    """Return the CPUs this process may run on (unlike `os.cpu_count`, counting an affinity mask or
    cpuset)."""
    return len(os.sched_getaffinity(0))


def parse_size(text: object) -> int:
    """Parse `4096`, `64KiB` or `1.5G`: decimal units and, with an i, binary ones. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size such as 64MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


def at_least(minimum: int) -> Callable[[object], int]:
    def parse(text: object) -> int:
        size = parse_size(text)
        if size < minimum:
            raise ValueError(f"expected at least {minimum >> 20} MiB")
        return size

    return parse


def _whole(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise ValueError("expected a whole number") from None


def parse_positive(text: object) -> int:
    value = _whole(text)
    if value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def parse_seconds(text: object) -> float:
    with contextlib.suppress(ValueError):
        value = float(str(text))
        if 0 < value < 1e7:
            return value
    raise ValueError("expected a number of seconds above 0")


def parse_delay(text: object) -> float:
    """Parse seconds of which there may be none."""
    with contextlib.suppress(ValueError):
        value = float(str(text))
        if 0 <= value < 600:
            return value
    raise ValueError("expected a number of seconds from 0 to below 600")


def parse_days(text: object) -> int:
    value = _whole(text)
    if not 0 <= value <= 36_500:
        raise ValueError("expected a whole number of days, or 0 for never")
    return value


def choice(*allowed: str) -> Callable[[object], str]:
    def parse(text: object) -> str:
        if str(text) not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return str(text)

    return parse


SIGV2 = ("off", "presigned", "all")
_SWITCH = frozenset({"on", "off", "true", "false"})


def parse_switch(text: object) -> bool:
    # YAML 1.1 reads `on` and `off` as booleans.
    if str(text).lower() not in _SWITCH:
        raise ValueError("expected on or off")
    return str(text).lower() in {"on", "true"}


def parse_sigv2(text: object) -> str:
    """Parse which requests may use version 2; `on` and `off` are accepted from when it was a switch."""
    if str(text).lower() in _SWITCH:
        return "all" if parse_switch(text) else "off"
    if text not in SIGV2:
        raise ValueError(f"expected one of {', '.join(SIGV2)}")
    return str(text)


def parse_kept(text: object) -> int | None:
    """Parse `auto` (None), `off` (0) or a size."""
    if text == "auto":
        return None
    if str(text).lower() in {"off", "false"}:
        return 0
    with contextlib.suppress(ValueError):
        return parse_size(text)
    raise ValueError("expected auto, off, or a size such as 200GB")


def parse_name(text: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", str(text)):
        raise ValueError("expected letters, digits, dots and dashes, at most 63")
    return str(text)


def parse_path(text: object) -> Path:
    if not isinstance(text, str | os.PathLike) or not str(text):
        raise ValueError("expected a path")
    return Path(os.path.abspath(Path(text).expanduser()))


def parse_audit(text: object) -> Path:
    return Path("-") if text == "-" else parse_path(text)


def parse_local(text: object) -> bool | Path:
    """Parse on, off or a directory."""
    return parse_switch(text) if str(text).lower() in _SWITCH else parse_path(text)


def parse_paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str):
        value = [item for item in value.split(os.pathsep) if item]
    if not isinstance(value, list | tuple):
        raise ValueError("expected a path or a list of paths")  # noqa: TRY004  reported as a bad setting
    return tuple(parse_path(item) for item in value)


def parse_domains(value: object) -> tuple[str, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("expected a domain or a list of domains")  # noqa: TRY004  reported as a bad setting
    found = tuple(str(item).lower().strip(".") for item in items)
    label = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
    for name in found:
        if len(name) > 180 or not re.fullmatch(rf"(?:{label}\.)*[a-z][a-z0-9-]*", name):
            raise ValueError("expected a domain such as s3.example.com, without a port")
    return found


_KUBERNETES_NAME = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"


def parse_control(value: object) -> ControlAddress | KubernetesAddress | None:
    """Parse `embedded` (None), `etcd://HOST:PORT[,HOST:PORT][/PREFIX]` or `kubernetes://NAMESPACE/NAME`.
    Raises ValueError."""
    text = str(value)
    if text == "embedded":
        return None
    if text.startswith("kubernetes:"):
        found = re.fullmatch(rf"kubernetes://({_KUBERNETES_NAME})?/({_KUBERNETES_NAME})", text)
        if found is None or len(found[2]) > 40:
            raise ValueError("expected kubernetes://NAMESPACE/NAME, in lower case, NAME of at most 40")
        return KubernetesAddress(found[1] or "", found[2])
    form = r"etcd(s?)://(?:([^:@/]+):([^@/]*)@)?([^/@]+)(/[A-Za-z0-9._/-]*)?"
    match = re.fullmatch(form, text)
    hint = "expected embedded, etcd://HOST:PORT[,HOST:PORT][/PREFIX] or kubernetes://NAMESPACE/NAME"
    if match is None:
        raise ValueError(hint)
    try:
        members = tuple(parse_listen(item) for item in match[4].split(","))
    except ValueError:
        raise ValueError(hint) from None
    login = (unquote(match[2]), unquote(match[3])) if match[2] else None
    prefix = f"/{(match[5] or '').strip('/') or 'shardmesh'}/"
    return ControlAddress(members, prefix, bool(match[1]), login)


def parse_roles(value: object) -> tuple[str, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if isinstance(items, list | tuple):
        items = [word for item in items for word in str(item).replace(",", " ").split()]
    known = ("store", "cache", "compute")
    if not isinstance(items, list) or not items or not set(items) <= set(known):
        raise ValueError("expected some of store, cache, compute")
    return tuple(role for role in known if role in items)


def parse_place(text: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._/-]{0,63}", str(text)):
        raise ValueError("expected letters, digits, dots, dashes and slashes, at most 63")
    return str(text)


def parse_machine(text: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,253}", str(text)):
        raise ValueError("expected letters, digits, dots and dashes, at most 253")
    return str(text)


def parse_url(text: object) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]{1,255}", str(text)):
        raise ValueError("expected a URL such as http://10.0.0.5:9000, without a path")
    host = str(text).partition("://")[2]
    if host.count(":") > 1 and not re.fullmatch(r"\[[^\[\]]+\](:[0-9]+)?", host):
        raise ValueError("expected an IPv6 address in brackets, such as http://[fd00::5]:9000")
    return str(text)


def parse_traces_url(text: object) -> str:
    """Parse the URL of a collector; without a path, spans go to OTLP's `/v1/traces`."""
    match = re.fullmatch(r"(https?://[A-Za-z0-9._:\[\]-]{1,255})(/[A-Za-z0-9._~/-]*)?", str(text))
    if match is None:
        raise ValueError("expected a URL such as http://collector:4318, without credentials or a query")
    path = (match[2] or "").rstrip("/")
    return match[1] + (path or "/v1/traces")


def parse_page_url(text: object) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]{1,255}(/[A-Za-z0-9._~/-]*)?", str(text)):
        raise ValueError("expected a URL such as https://grafana.example.org, without credentials or a query")
    return str(text)


def parse_share(text: object) -> float:
    with contextlib.suppress(ValueError):
        value = float(str(text))
        if 0 <= value <= 1:
            return value
    raise ValueError("expected a share from 0 to 1, such as 0.01")


def parse_copies(text: object) -> int:
    value = _whole(text)
    if not 1 <= value <= 8:
        raise ValueError("expected 1 to 8")
    return value


def parse_slots(text: object) -> int:
    value = _whole(text)
    if value & (value - 1) or not 1 << 14 <= value <= 1 << 20:
        raise ValueError("expected a power of two from 16384 to 1048576, such as 131072")
    return value


def parse_weight(text: object) -> int:
    value = _whole(text)
    if not 0 <= value <= 1 << 20:
        raise ValueError("expected a whole number up to 1048576, or 0 for the GiB of its disks")
    return value


def parse_listen(text: object) -> tuple[str, int]:
    """Parse `HOST:PORT`, `:PORT` or `[v6]:PORT` into (host, port). Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]*)):(\d{1,5})", str(text))
    if match is None or int(match[3]) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:9000 or [::1]:9000")
    return match[1] or match[2] or "0.0.0.0", int(match[3])


LOG_LEVELS: Final = ("debug", "info", "warning", "error")
"""From the most to the least verbose."""


class Option(msgspec.Struct, frozen=True):
    """One setting, under one name: `--name`, `MESHD_NAME`, `name:` in the file."""

    name: str
    parse: Callable[[object], object]
    default: Callable[[], object]

    @property
    def env(self) -> str:
        return env_name(self.name)


def env_name(name: str) -> str:
    """Return the environment variable of a setting."""
    return "MESHD_" + name.replace("-", "_").upper()


RENAMED: Final[Mapping[str, str]] = {"transforms": "transform-workers", "remember-removals": "tombstone-ttl"}
"""Settings by their earlier name; accepted for one release, with a warning."""


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("data-dir", parse_path, lambda: None),
        Option("disk", parse_paths, tuple),
        Option("lost-disk", parse_paths, tuple),
        Option("index-dir", parse_path, lambda: None),
        Option("durability", choice("commit", "relaxed"), lambda: "commit"),
        Option("sync-interval", parse_seconds, lambda: 1.0),
        Option("small-object", parse_size, lambda: 1 << 20),
        Option("segment-size", at_least(1 << 20), lambda: 256 << 20),
        Option("disk-type", choice("auto", "rotational", "solid-state"), lambda: "auto"),
        Option("index-file-system", choice("local", "any"), lambda: "local"),
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
        Option("shutdown-delay", parse_delay, lambda: None),
        Option("sigv2", parse_sigv2, lambda: "presigned"),
        Option("console", parse_switch, lambda: False),
        Option("console-grafana", parse_page_url, lambda: ""),
        Option("console-oidc-role", parse_name, lambda: ""),
        Option("console-oidc-client", str, lambda: ""),
        Option("console-oidc-secret", parse_path, lambda: None),
        Option("hang-timeout", parse_seconds, lambda: 60.0),
        Option("workers", parse_positive, lambda: min(4, cores())),
        Option("transform-workers", parse_positive, cores),
        Option("transform-memory", at_least(64 << 20), lambda: 2 << 30),
        Option("frame-cache", at_least(1 << 20), lambda: 1 << 30),
        Option("decoded-cache", parse_kept, lambda: None),
        Option("decoded-cache-dir", parse_path, lambda: None),
        Option("local-frames", parse_local, lambda: True),
        Option("user-ops", parse_switch, lambda: True),
        Option("user-op-seconds", parse_seconds, lambda: 30.0),
        Option("user-op-memory", at_least(64 << 20), lambda: 4 << 30),
        Option("view-cache", at_least(1 << 20), lambda: 10 << 30),
        Option("read-ahead", at_least(64 << 20), lambda: 0),
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
        Option("tombstone-ttl", parse_seconds, lambda: 10 * 86400.0),
        Option("users", parse_path, lambda: None),
        Option("audit-log", parse_audit, lambda: None),
        Option("audit-size", parse_size, lambda: 0),
        Option("audit-files", parse_positive, lambda: 10),
        Option("trace-endpoint", parse_traces_url, lambda: None),
        Option("trace-ratio", parse_share, lambda: 0.01),
        Option("trace-keys", parse_switch, lambda: False),
        Option("control", parse_control, lambda: None),
        Option("control-ca", parse_path, lambda: None),
        Option("peer-ca", parse_path, lambda: None),
        Option("zone", parse_place, str),
        Option("rack", parse_place, str),
        Option("machine", parse_machine, str),
        Option("role", parse_roles, lambda: ("store", "cache", "compute")),
        Option("weight", parse_weight, lambda: 0),
        Option("copies", parse_copies, lambda: 2),
        Option("slots", parse_slots, lambda: 1 << 14),
        Option("advertise", parse_url, str),
        Option("lease", parse_seconds, lambda: 5.0),
        Option("down-after", parse_seconds, lambda: 900.0),
        Option("node-id", parse_name, lambda: parse_name(socket.gethostname())),
        Option("region", parse_name, lambda: "us-east-1"),
        Option("legacy-metric-names", parse_switch, lambda: True),
        Option("log-format", choice("text", "json"), lambda: "text"),
        Option("log-level", choice(*LOG_LEVELS), lambda: "info"),
    )
}
