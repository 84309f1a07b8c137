"""What one setting may say: parsers of single values, out of flags, variables and files alike.

Law: a ValueError names what would be accepted, and nothing else; `loading` says which setting it was.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from meshd.config.settings import ControlAddress, KubernetesAddress

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}


def cores() -> int:
    """CPUs this process may run on (an affinity mask or cpuset counts, unlike `os.cpu_count`)."""
    return len(os.sched_getaffinity(0))


def parse_size(text: object) -> int:
    """Bytes of `4096`, `64KiB`, `1.5G`: decimal units and, with an i, binary ones. Raises ValueError."""
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
    """`on` and `off` are from when this was a switch."""
    if str(text).lower() in _SWITCH:
        return "all" if parse_switch(text) else "off"
    if text not in SIGV2:
        raise ValueError(f"expected one of {', '.join(SIGV2)}")
    return str(text)


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
    """On, off, or where."""
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
    """`embedded` → None; `etcd://HOST:PORT[,HOST:PORT][/PREFIX]` and `kubernetes://NAMESPACE/NAME` → their
    addresses. Raises ValueError."""
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


def parse_url(text: object) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]{1,255}", str(text)):
        raise ValueError("expected a URL such as http://10.0.0.5:9000, without a path")
    return str(text)


def parse_copies(text: object) -> int:
    value = _whole(text)
    if not 1 <= value <= 8:
        raise ValueError("expected 1 to 8")
    return value


def parse_weight(text: object) -> int:
    value = _whole(text)
    if not 0 <= value <= 1 << 20:
        raise ValueError("expected a whole number up to 1048576, or 0 for the GiB of its disks")
    return value


def parse_listen(text: object) -> tuple[str, int]:
    """`HOST:PORT`, `:PORT`, `[v6]:PORT` → (host, port). Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]*)):(\d{1,5})", str(text))
    if match is None or int(match[3]) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:9000 or [::1]:9000")
    return match[1] or match[2] or "0.0.0.0", int(match[3])
