"""Loader: a node's settings from flags, environment and configuration file.

Precedence is flags, then environment (MESHD_*), then the configuration file, then the default. An error is
one line: the setting, its source, and what would be accepted.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from meshd.config.options import OPTIONS, RENAMED, env_name
from meshd.config.settings import (
    ClusterSettings,
    ConfigError,
    ConsoleOidc,
    ControlAddress,
    HttpSettings,
    KubernetesAddress,
    NodeSettings,
    StoreSettings,
    TracingSettings,
    TransformSettings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import yaml

    from meshd.config.options import Option

_MIN_TOMBSTONE_TTL = 3600.0
_KUBERNETES_DELAY = 5.0


def load_settings(
    flags: Mapping[str, object], *, config_file: Path | None = None, env: Mapping[str, str] | None = None
) -> NodeSettings:
    """Load the node's settings from flags (None means not given), MESHD_* variables and a YAML file.

    Raises ConfigError, which names the setting, its source and what would be accepted.
    """
    environment = os.environ if env is None else env
    given: dict[str, object] = {}
    if config_file is not None:
        given.update(_read_file(config_file))
    sources = {name: f"{name} in {config_file}" if name in RENAMED else str(config_file) for name in given}
    for name in (*OPTIONS, *RENAMED):
        if environment.get(env_name(name)):
            given[name], sources[name] = environment[env_name(name)], env_name(name)
    for name, value in flags.items():
        key = _require_known(name, "the command line")
        if value is not None and value != ():
            given[key], sources[key] = value, f"--{key}"
    warnings = _rename_settings(given, sources)
    values = {name: _value(option, given, sources) for name, option in OPTIONS.items()}
    return _assemble(values, warnings)


def _rename_settings(given: dict[str, object], sources: dict[str, str]) -> tuple[str, ...]:
    """Move settings given under an earlier name to the new one; return a warning for each. Raises ConfigError
    if a setting is given under both names."""
    warnings = []
    for old, new in RENAMED.items():
        if old in given:
            if new in given:
                raise ConfigError(
                    f"{new} is given twice, as {new} (from {sources[new]}) and under its earlier name {old} "
                    f"(from {sources[old]}); remove {old}"
                )
            given[new], sources[new] = given.pop(old), sources.pop(old)
            warnings.append(
                f"the setting {old} is deprecated (from {sources[new]}): use {new}; the next release refuses "
                f"{old}"
            )
    return tuple(warnings)


def _value(option: Option, given: Mapping[str, object], sources: Mapping[str, str]) -> object:
    if option.name not in given:
        return option.default()
    try:
        return option.parse(given[option.name])
    except ValueError as error:
        shown = str(given[option.name])[:80]
        raise ConfigError(f"{option.name}: {error}, not {shown!r} (from {sources[option.name]})") from None


def _require_known(name: str, source: str) -> str:
    key = str(name).replace("_", "-")
    if key in OPTIONS or key in RENAMED:
        return key
    close = difflib.get_close_matches(key, OPTIONS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known settings: {', '.join(OPTIONS)}"
    raise ConfigError(f"unknown setting {str(name)[:80]!r} in {source}; {hint}")


def _read_file(path: Path) -> dict[str, object]:
    import yaml  # most nodes have no such file

    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path} must be a mapping of settings, such as `workers: 2`")
    return {
        _require_known(name, str(path)): value
        for name, value in (document or {}).items()
        if value is not None
    }


def _one_line(error: yaml.YAMLError) -> str:
    """Return the problem and its place, without the source lines that PyYAML quotes: they may hold a
    secret."""
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or 'unreadable characters'}{place}"


def _assemble(values: Mapping[str, object], warnings: tuple[str, ...]) -> NodeSettings:
    value = cast("Mapping[str, Any]", values)
    if value["data-dir"] is None:
        raise ConfigError(
            "data-dir is required: set the directory of the node's data, as in --data-dir ./data"
        )
    if (value["tls-cert"] is None) != (value["tls-key"] is None):
        given, missing = ("tls-key", "tls-cert") if value["tls-cert"] is None else ("tls-cert", "tls-key")
        raise ConfigError(f"{given} needs {missing}: give the certificate and its private key, or neither")
    host, port = value["listen"]
    data_dir: Path = value["data-dir"]
    store = StoreSettings(
        data_dir=data_dir,
        disks=_require_distinct(value["disk"]) or (data_dir,),
        index_dir=value["index-dir"] or data_dir / "index",
        durability=value["durability"],
        sync_seconds=value["sync-interval"],
        small_object_bytes=value["small-object"],
        segment_bytes=value["segment-size"],
        index_map_bytes=value["index-map"],
        disk_type=value["disk-type"],
        any_index_file_system=value["index-file-system"] == "any",
        tombstone_seconds=_tombstone_ttl(value) if value["control"] is not None else 0.0,
    )
    http = HttpSettings(
        host=host,
        port=port,
        domains=value["domain"],
        tls_cert=value["tls-cert"],
        tls_key=value["tls-key"],
        body_timeout=value["body-timeout"],
        idle_timeout=value["idle-timeout"],
        head_timeout=value["head-timeout"],
        max_connections=_connections(value),
        drain_timeout=value["drain-timeout"],
        shutdown_delay=_shutdown_delay(value),
        sigv2=value["sigv2"],
        console=value["console"],
        console_grafana=value["console-grafana"],
        console_oidc=_console_oidc(value),
    )
    return NodeSettings(
        node_id=value["node-id"],
        store=store,
        http=http,
        transform=TransformSettings(
            value["transform-workers"],
            value["frame-cache"],
            decoded_cache_bytes=value["decoded-cache"],
            decoded_cache_dir=value["decoded-cache-dir"],
            process_bytes=value["transform-memory"],
            local_frames=value["local-frames"],
            user_ops=value["user-ops"],
            user_op_seconds=value["user-op-seconds"],
            user_op_memory=value["user-op-memory"],
        ),
        cluster=_cluster(value),
        workers=value["workers"],
        lost_disks=value["lost-disk"],
        users_file=value["users"],
        view_cache_bytes=value["view-cache"],
        archive_ratio=value["archive-ratio"],
        read_ahead_bytes=value["read-ahead"],
        cache_bytes=value["cache"],
        credentials_dir=value["origin-credentials"],
        origin_patience=value["origin-patience"],
        lifecycle_interval=value["lifecycle-interval"],
        stale_upload_days=value["stale-uploads"],
        keep_documents_days=value["keep-documents"],
        tombstone_ttl=value["tombstone-ttl"],
        scrub_interval=value["scrub-interval"],
        scrub_rate=value["scrub-rate"],
        audit_log=value["audit-log"],
        audit_bytes=value["audit-size"],
        audit_files=value["audit-files"],
        legacy_metric_names=value["legacy-metric-names"],
        tracing=_tracing(value),
        start_warnings=warnings,
        region=value["region"],
        hang_timeout=value["hang-timeout"],
        log_format=value["log-format"],
        log_level=value["log-level"],
    )


def _tracing(value: Mapping[str, Any]) -> TracingSettings | None:
    if value["trace-endpoint"] is None:
        return None
    return TracingSettings(value["trace-endpoint"], value["trace-ratio"], value["trace-keys"])


def _shutdown_delay(value: Mapping[str, Any]) -> float:
    """Return how long a node accepts connections after SIGTERM: on Kubernetes, kube-proxy learns of it from
    the API server, on each machine by itself."""
    given: float | None = value["shutdown-delay"]
    if given is not None:
        return given
    return _KUBERNETES_DELAY if isinstance(value["control"], KubernetesAddress) else 0.0


def _connections(value: Mapping[str, Any]) -> int:
    """Return the maximum connections of one worker."""
    wanted: int = value["max-connections"]
    workers: int = value["workers"]
    if wanted < workers:
        raise ConfigError(
            f"max-connections: {wanted} are too few for {workers} workers, each of which needs one: set at "
            f"least {workers}, or use fewer workers"
        )
    return wanted // workers


def _console_oidc(value: Mapping[str, Any]) -> ConsoleOidc | None:
    role, client = value["console-oidc-role"], value["console-oidc-client"]
    if bool(role) != bool(client):
        raise ConfigError("console-oidc-role and console-oidc-client belong together: set both, or neither")
    if value["console-oidc-secret"] is not None and not role:
        raise ConfigError("console-oidc-secret needs console-oidc-role and console-oidc-client")
    return ConsoleOidc(role, client, value["console-oidc-secret"]) if role else None


def _tombstone_ttl(value: Mapping[str, Any]) -> float:
    """Return how long deletions are remembered; longer than an absent node is waited for."""
    seconds: float = value["tombstone-ttl"]
    least = max(_MIN_TOMBSTONE_TTL, 2 * value["down-after"])
    if seconds < least:
        raise ConfigError(
            f"tombstone-ttl: {seconds:g} seconds are too few, because a node that is away for longer "
            f"discards its data and starts empty; set at least {least:g} (twice down-after, and an hour)"
        )
    return seconds


def _cluster(value: Mapping[str, Any]) -> ClusterSettings:
    control = value["control"]
    if value["control-ca"] is not None:
        if not isinstance(control, ControlAddress) or not control.tls:
            raise ConfigError("control-ca needs --control etcds://…, whose certificates it verifies")
        control = replace(control, ca=value["control-ca"])
    host = value["listen"][0]
    if control is not None and not value["advertise"] and host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"advertise is required if the node listens on every address ({host}): set the URL under which "
            "others reach it, as in --advertise http://10.0.0.5:9000"
        )
    return ClusterSettings(
        control,
        value["zone"],
        value["rack"],
        value["role"],
        value["weight"],
        value["copies"],
        value["advertise"],
        value["lease"],
        value["down-after"],
        value["peer-ca"],
        value["repair-interval"],
        value["machine"],
        value["slots"],
    )


def _require_distinct(disks: tuple[Path, ...]) -> tuple[Path, ...]:
    if len(set(disks)) != len(disks):
        raise ConfigError("disk: the same directory is given twice; each --disk needs its own")
    return disks
