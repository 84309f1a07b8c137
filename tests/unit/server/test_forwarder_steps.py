"""Whom a request is passed to, and what becomes of it by what the nodes that were asked say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshd.rpc.http_connection import PeerUnreachableError, ResponseHead
from meshd.rpc.peer_client import MAP_HEADER
from meshd.server.proxy.forwarder import Forwarder
from meshd.server.proxy.hops import SKEWED_HEADER, LocalDamageError, ObjectName
from meshd.store.errors import CorruptExtentError, QuarantinedError
from meshd.store.records import INTERNAL_WRITE
from meshwire.cluster import Node
from meshwire.cluster.routes import COMPLETE_STATES, Route
from meshwire.errors import S3Error
from meshwire.http_values.mesh_headers import DAMAGED_HEADER, FINAL_DAMAGE
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence

READ, WRITE = ObjectName("b", "k", reading=True), ObjectName("b", "k", reading=False)
ME, OTHERS = "n0", ("n1", "n2")


class _Map:
    """A mesh whose map moves a version whenever it is waited for, and the clock by a second."""

    def __init__(self, clock: ManualClock, owners: Sequence[str]) -> None:
        self.node_id, self.own_node = ME, None
        self.owners, self.clock, self.version = owners, clock, 7
        self.suspected: list[str] = []
        self.silent: list[str] = []
        self.patience: list[float | None] = []
        self.being_probed: set[str] = set()
        self.retry_after_absence = 5
        self.waited: list[int] = []
        self.lease_valid = True
        self.third = "up"
        """The state of a node that is none of the owners that can be read from."""

    def current_map(self) -> Any:
        return SimpleNamespace(version=self.version)

    def all_nodes_complete(self) -> bool:
        return self.third in COMPLETE_STATES

    def route_for(self, bucket: str, key: str) -> Route:
        nodes = tuple(Node(name, f"http://{name}") for name in self.owners)
        return Route(nodes[0] if nodes else None, nodes, nodes)

    async def report_suspect(self, node_id: str, version: int, max_wait: float | None = None) -> None:
        self.suspected.append(node_id)
        self.patience.append(max_wait)

    def is_suspect(self, node_id: str) -> bool:
        return node_id in self.being_probed

    def note_silence(self, node_id: str) -> None:
        self.silent.append(node_id)

    async def wait_for_newer_map(self, version: int, patience: float) -> None:
        self.waited.append(version)
        self.version = max(self.version, version + 1)
        self.clock.advance(1.0)


class _Scripted(Forwarder):
    """Nodes answer by the script, one line an attempt; an answer is sent when there is none left."""

    def __init__(self, mesh: _Map, script: Sequence[ResponseHead | Exception | None], *, gone: bool) -> None:
        super().__init__(mesh, None, None, mesh.clock, lambda: 0, 1.0)  # type: ignore[arg-type]
        self._script, self._gone, self.asked = list(script), gone, list[str]()

    async def _try(self, node: Node, forward_state: Any) -> ResponseHead | None:
        self.asked.append(node.node_id)
        forward_state.sending.body_started = self._gone
        said = self._script.pop(0) if self._script else None
        if isinstance(said, Exception):
            raise said
        if said is None:
            forward_state.sending.relay = SimpleNamespace(
                head=ResponseHead(200, {}, 0, b""), closes_connection=False
            )
        return said


def _says(status: int, header: str, value: str = "1") -> ResponseHead:
    return ResponseHead(status, {header: value}, 0, b"")


DAMAGED, SKEWED = _says(503, DAMAGED_HEADER), _says(503, SKEWED_HEADER)
FINAL = _says(503, DAMAGED_HEADER, FINAL_DAMAGE)
AWAY = PeerUnreachableError("refused")
BEGUN = PeerUnreachableError("reset", begun=True)


def _run(forwarder: Forwarder, name: ObjectName, **how: Any) -> Any:
    request: Any = SimpleNamespace(
        method="GET", body_exists=False, headers={}, content_length=None, held_body=None, keep_alive=True
    )
    trace: Any = SimpleNamespace(sent=0, received=0)
    operation: Any = SimpleNamespace()
    return asyncio.run(forwarder.forward(request, operation, name, trace, INTERNAL_WRITE, **how))


def _forward(
    *script: ResponseHead | Exception | None,
    name: ObjectName = READ,
    owners: Sequence[str] = OTHERS,
    gone: bool = False,
    third: str = "up",
    **how: Any,
) -> tuple[int | None, list[str], _Map]:
    """(status, or None when it is this node's after all; who was asked; the mesh)."""
    mesh = _Map(ManualClock(), owners)
    mesh.third = third
    forwarder = _Scripted(mesh, script, gone=gone)
    try:
        reply = _run(forwarder, name, **how)
    except S3Error as error:
        error.add_note(" ".join(forwarder.asked))
        error.add_note(f"silent: {' '.join(mesh.silent)}")
        raise
    return None if reply is None else reply.status, forwarder.asked, mesh


def test_who_does_not_answer_is_suspected_and_the_next_is_asked() -> None:
    status, asked, mesh = _forward(AWAY)
    assert (status, asked, mesh.suspected) == (200, ["n1", "n2"], ["n1"])
    assert _forward(AWAY, AWAY)[1] == ["n1", "n2", "n1"]  # all once: then all again


def test_a_read_does_not_wait_for_the_lease_of_a_node_if_another_can_answer() -> None:
    assert _forward(AWAY)[2].patience == [0.0]
    assert _forward(AWAY, owners=("n1",))[2].patience == [None], "nobody else has it"
    assert _forward(AWAY, name=WRITE)[2].patience == [None]
    assert _forward(AWAY, AWAY)[2].patience == [0.0, None], "all were tried"


class _StillMap(_Map):
    """A map that does not change, however long it is waited for."""

    async def wait_for_newer_map(self, version: int, patience: float) -> None:
        self.clock.advance(patience)


@pytest.mark.parametrize("name", [READ, WRITE])
def test_who_is_away_for_long_is_not_waited_for(name: ObjectName) -> None:
    mesh = _StillMap(ManualClock(), ())
    forwarder = _Scripted(mesh, (), gone=False)

    def waited() -> float:
        began = mesh.clock.monotonic()
        with pytest.raises(S3Error, match="No node that has all writes of this name") as caught:
            _run(forwarder, name)
        assert caught.value.headers["retry-after"] == "5"
        return mesh.clock.monotonic() - began

    for _ in range(20):
        assert waited() == 15, "the owner may be restarting"
    assert waited() == 0
    mesh.lease_valid = False
    assert waited() == 15, "the map may be outdated"
    mesh.lease_valid = True
    mesh.version += 1
    assert waited() == 15


def test_reads_prefer_nodes_that_are_not_being_probed() -> None:
    mesh = _Map(ManualClock(), OTHERS)
    mesh.being_probed.add("n1")
    forwarder = _Scripted(mesh, (), gone=False)
    assert [node.node_id for node in forwarder._candidates(READ)] == ["n2", "n1"]
    assert [node.node_id for node in forwarder._candidates(WRITE)] == ["n1"]


def test_what_may_have_been_done_is_not_sent_twice() -> None:
    assert _forward(BEGUN, name=READ)[:2] == (200, ["n1", "n2"])
    assert _forward(AWAY, name=WRITE)[:2] == (200, ["n1", "n1"])
    with pytest.raises(S3Error, match=r"n1 disconnected .* may or may not have been executed"):
        _forward(BEGUN, name=WRITE)
    with pytest.raises(S3Error, match="n1 disconnected") as caught:
        _forward(AWAY, gone=True)
    assert caught.value.__notes__[1] == "silent: n1"  # for Retry-After


@pytest.mark.parametrize(
    ("said", "why"),
    [(SKEWED, "clocks of nodes n1 and n0"), (_says(421, MAP_HEADER, "9"), "owners .* changed")],
)
def test_a_body_that_has_gone_is_not_sent_again(said: ResponseHead, why: str) -> None:
    assert _forward(said, name=WRITE)[0] == 200
    with pytest.raises(S3Error, match=why) as caught:
        _forward(said, name=WRITE, gone=True)
    assert caught.value.code == "SlowDown"


@pytest.mark.parametrize("name", [READ, WRITE])
def test_a_clock_that_differs_is_not_waited_for(name: ObjectName) -> None:
    """One refusal may be of a request that was sent long ago; after a second one no wait helps."""
    mesh = _Map(ManualClock(), OTHERS)
    forwarder = _Scripted(mesh, [SKEWED] * 99, gone=False)
    with pytest.raises(S3Error, match="clocks of nodes n1 and n0"):
        _run(forwarder, name)
    assert forwarder.asked == (["n1", "n2"] * 2 if name.reading else ["n1"] * 2)
    assert _forward(SKEWED, name=name)[0] == 200
    assert _forward(SKEWED, AWAY, SKEWED, AWAY, name=READ)[0] == 200, "the other node may return"


def test_a_newer_map_is_waited_for() -> None:
    assert _forward(_says(421, MAP_HEADER, "9"))[2].waited == [8]
    assert _forward(_says(421, MAP_HEADER, "5"))[2].waited == []


def test_damaged_copies_are_not_asked_for_again() -> None:
    assert _forward(DAMAGED, AWAY)[1] == ["n1", "n2", "n2"]
    with pytest.raises(S3Error, match="damaged on every node") as caught:
        _forward(DAMAGED, DAMAGED)
    assert caught.value.__notes__[0] == "n1 n2"
    own = LocalDamageError(QuarantinedError("in quarantine"), "b/k")
    with pytest.raises(S3Error, match="b/k is damaged on disk"):
        _forward(DAMAGED, DAMAGED, damaged=own)
    assert _forward(owners=[ME, "n1"], damaged=own)[1] == ["n1"]


@pytest.mark.parametrize(
    ("answers", "states", "own", "final"),
    [
        ([FINAL, FINAL], "up", None, True),
        ([FINAL, FINAL], "up", QuarantinedError("in quarantine"), True),
        ([FINAL, DAMAGED], "up", None, False),  # found just now: the next read may be right
        ([FINAL, FINAL], "up", CorruptExtentError("another checksum"), False),
        ([FINAL, FINAL], "away", None, False),  # it may have another copy
    ],
)
def test_what_no_node_can_have_is_not_worth_another_try(
    answers: list[ResponseHead], states: str, own: CorruptExtentError | None, final: bool
) -> None:
    damaged = None if own is None else LocalDamageError(own, "b/k")
    with pytest.raises(S3Error) as caught:
        _forward(*answers, damaged=damaged, third=states)
    assert (caught.value.code, caught.value.headers.get(DAMAGED_HEADER) == FINAL_DAMAGE) == (
        "InternalError",
        final,
    )


def test_it_ends_here_when_this_node_answers() -> None:
    assert _forward(owners=[ME, "n1"])[:2] == (None, [])
    assert _forward(owners=["n1", ME], aim="part")[:2] == (200, ["n1"])


def test_nobody_is_waited_for_without_end() -> None:
    with pytest.raises(S3Error, match=r"\(n1, n2\) do not answer"):
        _forward(*[AWAY] * 99)
    with pytest.raises(S3Error, match="No node that has all") as caught:
        _forward(owners=[])
    assert caught.value.headers == {"retry-after": "5"}
