"""What all tests share: one daemon for the session, a bucket for each test, and checks for leaks."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import uuid
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from meshd.transform.parquet import reader_template
from meshd.util.shared_counters import NICE_FAILPOINT
from tests.support import cpu_report, fresh_fixtures, sampling, scheduling
from tests.support.daemon_cluster import running_nodes
from tests.support.daemons import Daemon, live_daemons, with_failpoints
from tests.support.fork_server import PLACES, ForkServers, NodeTemplates, forked_from
from tests.support.interpreters import InterpreterServer, python
from tests.support.one_node import one_node

if TYPE_CHECKING:
    from collections.abc import Iterator

# Many programs run beside each other: threads of their own for linear algebra, a collector of Go's that keeps
# them small, and a scheduler of Go's that looks for work on every processor, would cost more than they give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOGC", "400")
os.environ.setdefault("GOMAXPROCS", "1")
# Programs inherit that a shell ignores SIGINT for what it runs in the background; tests interrupt some.
signal.signal(signal.SIGINT, signal.default_int_handler)
_INTERRUPT_AGAIN = 60.0
# A machine that is slow, or has other things to do, is no failure.
# Inputs are drawn anew in CI, too: Hypothesis's own profile for CI would draw the same ones for ever. A third
# of the usual number in a run is the usual number in three runs.
settings.register_profile(
    "patient",
    settings.get_profile("default"),
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


_servers = ForkServers()


@pytest.fixture(scope="session", autouse=True)
def _forked_nodes() -> Iterator[None]:
    """Nodes are forked from a process that has loaded all modules, but where a test says otherwise. What
    moves their data gives way to their clients by its pauses, not to whatever other tests run: put behind all
    of these, with niceness, it came to nothing for minutes."""
    with (
        _servers,
        forked_from(_servers),
        with_failpoints(f"{NICE_FAILPOINT}=error"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(PLACES, os.pathsep.join(map(str, _servers.places)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _parquet_template() -> Iterator[None]:
    """The process that readers of Parquet are forked from ends with the tests, as with a node."""
    yield
    reader_template.close_template()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A running daemon with one worker. Do not stop or change it: others use it too.

    It keeps idle connections: one that is closed just as a test sends its next request is the client's to
    repeat, and clients here repeat nothing.
    """
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MESHD_IDLE_TIMEOUT", "3600")
            running = stack.enter_context(one_node())
        yield running


@pytest.fixture(scope="session")
def s3(daemon: Daemon) -> Iterator[Any]:
    """boto3 with the root keys of `daemon`."""
    client = daemon.client()
    yield client
    client.close()


@pytest.fixture
def bucket(s3: Any) -> Iterator[str]:
    """A new bucket on `daemon`, emptied and removed at the end."""
    name = f"test-{uuid.uuid4().hex[:20]}"
    s3.create_bucket(Bucket=name)
    yield name
    for upload in s3.list_multipart_uploads(Bucket=name).get("Uploads", []):
        s3.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=name):
        found = page.get("Versions", []) + page.get("DeleteMarkers", [])
        keys = [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in found]
        if keys:
            s3.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
    s3.delete_bucket(Bucket=name)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """A test ends the processes it starts."""
    before, shared = _children(), live_daemons()
    yield
    # Python keeps a process of its own for shared semaphores, started by whoever needs it first.
    before.add(getattr(resource_tracker._resource_tracker, "_pid", None) or 0)
    before |= {daemon.pid for daemon in shared}  # a test may have restarted one that others use, too
    before |= running_nodes()  # of meshes that a whole module uses, restarted in between
    before |= _servers.pids
    before.add(reader_template.template_pid())  # readers of Parquet in this process share it
    left = {pid: _command(pid) for pid in _children() - before}
    assert not left, f"the test left processes running: {left}"


def _children() -> set[int]:
    """Process ids of this process's children, and of the nodes that are forked for it. All processes are not
    looked at: that is 2 ms, twice a test."""
    found = set[int]()
    for parent in ("self", *_servers.pids):
        tasks = f"/proc/{parent}/task"
        for task in os.listdir(tasks):
            with (
                suppress(FileNotFoundError, ProcessLookupError),  # a thread that ends meanwhile
                open(f"{tasks}/{task}/children", "rb", 0) as children,
            ):
                found.update(map(int, children.read().split()))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "(a zombie)"
    except OSError:
        return "(gone)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-report", metavar="FILE", help="append the CPU seconds of each test to a file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(fresh_fixtures)
    cpu_report.switch_on(config, lambda: _servers.pids)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test has its whole time, and so has its end.

    pytest-timeout starts its timer once for a test and stops it at the first failure: what hangs at its end
    after that would hang for ever. Behind this stands `faulthandler_timeout` of pyproject.toml, for
    code that no signal interrupts.
    """
    _start_timer_again(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _start_timer_again(item)


def _start_timer_again(item: pytest.Item) -> None:
    settings = pytest_timeout._get_item_settings(item)
    item.ihook.pytest_timeout_cancel_timer(item=item)
    if settings.timeout is not None and settings.timeout > 0:
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
        if settings.method == "signal":
            # And again while the test, interrupted, waits for what will not end: the threads of a pool, say.
            signal.setitimer(signal.ITIMER_REAL, settings.timeout, _INTERRUPT_AGAIN)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """CI takes a sample of some tests. Where several processes run them, what takes long is begun first."""
    config.hook.pytest_deselected(items=sampling.sample(items, sampling.commit()))
    if hasattr(config, "workerinput"):
        scheduling.sort(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """The garbage collector rests while modules load and tests are found, a third of that time; what there is
    then stays, and is not looked through again with each collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Processes that run tests are forked from one that has collected them; those that nodes are forked from,
    from one of two."""
    for started in (InterpreterServer(config.args), NodeTemplates()):
        config.add_cleanup(started.close)
    for spec in specs:
        if spec.popen:
            spec.python = shlex.quote(python())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> scheduling.LongestFirst | None:
    return scheduling.LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the daemon's log with the failure of a test that used one."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Daemon):
                report.sections.append((f"output of {name}", value.output()[-8000:]))
    return report
