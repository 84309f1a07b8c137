"""Settings: precedence, sizes, addresses, refusals that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.config import OPTIONS, ConfigError, StoreSettings, load_settings, parse_listen, parse_size


def test_defaults_hang_together() -> None:
    settings = load_settings({"data_dir": "/data"}, env={})
    assert settings.store == StoreSettings.at(Path("/data"))
    assert settings.store.index_dir == Path("/data/index")
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 9000)
    assert 1 <= settings.workers <= 4
    assert settings.transform.processes >= 1
    assert settings.coordinator_socket == Path("/data/run/coordinator.sock")
    assert settings.transform_socket(3) == Path("/data/run/transform-3.sock")


def test_flags_win_over_the_environment_and_it_over_defaults() -> None:
    env = {"MESHD_DATA_DIR": "/env", "MESHD_WORKERS": "3", "MESHD_UNRELATED": "x", "MESHD_LISTEN": ""}
    settings = load_settings({"workers": "2", "listen": None, "disk": ()}, env=env)
    assert settings.workers == 2
    assert settings.store.data_dir == Path("/env")
    assert settings.http.port == 9000


def test_disks_may_be_many_but_not_the_same_twice() -> None:
    settings = load_settings({"data_dir": "/d", "disk": ("/a", "/b")}, env={})
    assert settings.store.disks == (Path("/a"), Path("/b"))
    assert load_settings({"data_dir": "/d"}, env={"MESHD_DISK": "/a:/b"}).store.disks == settings.store.disks
    with pytest.raises(ConfigError, match="same directory is given twice"):
        load_settings({"data_dir": "/d", "disk": ("/a", "/a")}, env={})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64KiB", 65536),
        ("64kib", 65536),
        ("1.5G", 1_500_000_000),
        ("2 GB", 2 * 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1X", "one", "1 2", "k", "1e9"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 64MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        (":80", ("0.0.0.0", 80)),
        ("[::1]:9000", ("::1", 9000)),
        ("storage.local:65535", ("storage.local", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize("text", ["", "9000", "host:", "host:65536", "::1:80", "[x]:1"])
def test_addresses_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_listen(text)


def test_every_complaint_names_setting_value_and_source() -> None:
    with pytest.raises(
        ConfigError, match=r"workers: expected a whole number, not 'many' \(from MESHD_WORKERS\)"
    ):
        load_settings({"data_dir": "/d"}, env={"MESHD_WORKERS": "many"})
    with pytest.raises(ConfigError, match=r"one of commit, relaxed, not 'no'.*--durability"):
        load_settings({"data_dir": "/d", "durability": "no"}, env={})
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        load_settings({"data_dir": "/d", "worker": "2"}, env={})
    with pytest.raises(ConfigError, match="data-dir is required"):
        load_settings({}, env={})


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"data-dir"}))
@pytest.mark.parametrize("value", ["", "\x00", "-5", "[", "☃" * 100])
def test_no_value_of_any_setting_is_worse_than_refused(name: str, value: str) -> None:
    try:
        load_settings({"data-dir": "/d", name: value}, env={})
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017  either outcome is fine


def test_removals_are_remembered_for_longer_than_a_node_may_be_away() -> None:
    mesh = {"data_dir": "/d", "control": "etcd://127.0.0.1:2379"}
    assert load_settings(mesh, env={}).store.tombstone_seconds == 10 * 86400
    assert load_settings({"data_dir": "/d"}, env={}).store.tombstone_seconds == 0  # nobody has to be told
    short = load_settings(mesh | {"tombstone_ttl": "3600", "repair_interval": "60"}, env={})
    assert (short.store.tombstone_seconds, short.cluster.repair_interval) == (3600, 60)
    for wrong in ({"tombstone_ttl": "3599"}, {"tombstone_ttl": "7199", "down_after": "3600"}):
        with pytest.raises(ConfigError, match=r"starts empty; set at least"):
            load_settings(mesh | wrong, env={})


@pytest.mark.parametrize(("text", "slots"), [("16384", 16_384), ("131072", 131_072), ("1048576", 1 << 20)])
def test_slots_of_a_new_mesh(text: str, slots: int) -> None:
    assert load_settings({"data_dir": "/d", "slots": text}, env={}).cluster.slots == slots
    assert load_settings({"data_dir": "/d"}, env={}).cluster.slots == 16_384


@pytest.mark.parametrize("text", ["8192", "100000", "2097152", "0", "-16384", "many", "16384.0"])
def test_other_numbers_of_slots_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"slots: expected a (power of two from 16384|whole number)"):
        load_settings({"data_dir": "/d", "slots": text}, env={})


def test_a_node_on_kubernetes_accepts_connections_a_while_after_sigterm() -> None:
    def delay(**flags: str) -> float:
        return load_settings(
            {"data-dir": "/d", "advertise": "http://a:1", **flags}, env={}
        ).http.shutdown_delay

    assert delay() == delay(control="etcd://a:1") == 0
    assert delay(control="kubernetes://ns/mesh") == 5
    assert delay(control="kubernetes://ns/mesh", **{"shutdown-delay": "0"}) == 0
    with pytest.raises(ConfigError, match=r"shutdown-delay.*from 0 to below 600"):
        delay(**{"shutdown-delay": "-1"})


@pytest.mark.parametrize("url", ["http://[fd00::5]:9000", "https://[fd00::5]", "http://n1:9000", "http://n1"])
def test_nodes_advertise_names_and_addresses(url: str) -> None:
    settings = load_settings({"data_dir": "/d", "control": "etcd://a:1", "advertise": url}, env={})
    assert settings.cluster.advertise == url


@pytest.mark.parametrize(
    "url", ["http://fd00::5:9000", "http://fd00::5", "http://[fd00::5", "http://[a]:b:9000"]
)
def test_an_address_of_ipv6_without_brackets_is_refused(url: str) -> None:
    """The peers would fail at it, one by one, and later."""
    with pytest.raises(ConfigError, match=r"advertise: expected an IPv6 address in brackets"):
        load_settings({"data_dir": "/d", "control": "etcd://a:1", "advertise": url}, env={})


def test_connections_are_shared_by_the_workers() -> None:
    told = {"data_dir": "/d", "workers": "3"}
    assert load_settings({**told, "max_connections": "11"}, env={}).http.max_connections == 3
    assert load_settings({**told, "max_connections": "3"}, env={}).http.max_connections == 1
    with pytest.raises(ConfigError, match="max-connections: 2 are too few for 3 workers"):
        load_settings({**told, "max_connections": "2"}, env={})


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [("transforms", "transform-workers", 3), ("remember-removals", "tombstone-ttl", 7200.0)],
)
def test_earlier_names_are_accepted_everywhere_with_a_warning(
    old: str, new: str, value: float, tmp_path: Path
) -> None:
    file = tmp_path / "meshd.yaml"
    file.write_text(f"data-dir: /d\n{old}: {value}\n")
    variable = f"MESHD_{old.replace('-', '_').upper()}"
    given = {
        f"{old} in {file}": load_settings({}, config_file=file, env={}),
        variable: load_settings({"data_dir": "/d"}, env={variable: str(value)}),
        f"--{old}": load_settings({"data_dir": "/d", old.replace("-", "_"): str(value)}, env={}),
    }
    for source, settings in given.items():
        assert {"transforms": settings.transform.processes, "remember-removals": settings.tombstone_ttl}[
            old
        ] == value
        assert settings.start_warnings == (
            f"the setting {old} is deprecated (from {source}): use {new}; the next release refuses {old}",
        )
    assert load_settings({"data_dir": "/d", new: str(value)}, env={}).start_warnings == ()
    with pytest.raises(ConfigError, match=rf"{new} is given twice, as {new} \(from --{new}\).*remove {old}"):
        load_settings({new: str(value)}, config_file=file, env={})
    with pytest.raises(ConfigError, match=rf"{new}: expected .* \(from {variable}\)"):
        load_settings({"data_dir": "/d"}, env={variable: "many"})


def test_renamed_metrics_are_exported_twice_unless_switched_off() -> None:
    assert load_settings({"data_dir": "/d"}, env={}).legacy_metric_names
    assert not load_settings(
        {"data_dir": "/d"}, env={"MESHD_LEGACY_METRIC_NAMES": "false"}
    ).legacy_metric_names


def test_a_sign_in_needs_its_role_and_its_client() -> None:
    role, client = {"console-oidc-role": "people"}, {"console-oidc-client": "console"}
    secret = {"console-oidc-secret": "/secret"}
    for flags in (role, client, role | secret, client | secret, secret):
        with pytest.raises(ConfigError, match="console-oidc-role and console-oidc-client"):
            load_settings({"data-dir": "d", **flags}, env={})
    found = load_settings({"data-dir": "d", **role, **client, **secret}, env={}).http.console_oidc
    assert found is not None
    assert (found.role, found.client_id, str(found.secret)) == ("people", "console", "/secret")
