"""Requests that one node passes on to another, byte by byte: bodies that wait to be asked for, that are
refused, wrong or cut; and what a stranger may say of where a request comes from."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from meshd.server.proxy.hops import HOP_HEADER, Hop, HopSigner
from tests.support.manual_clock import ManualClock
from tests.support.mesh_nodes import ROOT, NodesBeside
from tests.support.s3_raw import Wire, chunked_body, read_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.mesh_nodes import Running

MIB = 1 << 20
NOBODY = "/bench-not-there/k"


class Trio:
    """Three nodes with one copy of each object: `asked` passes on what `owner` answers for."""

    def __init__(self, beside: NodesBeside) -> None:
        self.beside = beside
        self.asked, self.owner, self.third = beside.nodes
        self.wire = Wire(self.asked.member.endpoint, *ROOT)
        self.target = f"/bench/{beside.key_of(1, 'told')}"

    def target_of(self, prefix: str) -> str:
        return f"/bench/{self.beside.key_of(1, prefix)}"

    def stored(self, target: str) -> bytes | None:
        """What the owner says."""
        direct = Wire(self.owner.member.endpoint, *ROOT)
        answer = direct.exchange(direct.head("GET", target), method="GET")
        direct.close()
        return answer.body if answer.status == 200 else None

    def signed_hop(self, hop: Hop, method: str, target: str, authorization: str) -> str:
        return self._hops(self.asked).sign_hop(hop, method, target, authorization)

    @staticmethod
    def _hops(node: Running) -> HopSigner:
        return HopSigner(node.peers._derive, node.node.clock)

    def until(self, found: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(6000):
            if self.beside.do(found):
                return
            pause.wait(0.01)
        raise AssertionError("it did not happen")


@pytest.fixture(scope="module")
def _trio() -> Iterator[Trio]:
    with NodesBeside(3) as beside:
        yield Trio(beside)


@pytest.fixture
def trio(_trio: Trio) -> Iterator[Trio]:
    """Whatever a test does, the connections between the nodes are in order afterwards."""
    yield _trio
    target, body = _trio.target_of("after"), os.urandom(70_000)
    for _ in range(4):
        assert _trio.wire.call("PUT", target, body).status == 200
        assert _trio.wire.call("GET", target).body == body
    _trio.wire.close()


@pytest.mark.parametrize("size", [0, 10, 300_000, 5 * MIB])
def test_a_body_that_waits_to_be_asked_for(trio: Trio, size: int) -> None:
    target, body = trio.target_of("waits"), os.urandom(size)
    whole = trio.wire.put(target, body, headers={"expect": "100-continue"})
    sock = trio.wire.connect()
    sock.sendall(whole[: len(whole) - size])
    if size:
        assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
    assert read_answer(sock, "PUT").status == 200
    assert trio.stored(target) == body
    if size:  # the connection goes on
        sock.sendall(trio.wire.head("HEAD", target))
        assert read_answer(sock, "HEAD").headers["content-length"] == str(size)


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_refused_body_is_never_asked_for(trio: Trio, size: int) -> None:
    stranger = Wire(trio.wire.endpoint, ROOT[0], "another secret")
    headers = {"expect": "100-continue"}
    trio.wire.call("PUT", trio.target, b"there")
    asked = [
        (stranger.put(trio.target, bytes(size), headers=headers), "SignatureDoesNotMatch"),
        (trio.wire.put(NOBODY, bytes(size), headers=headers), "NoSuchBucket"),
        (
            trio.wire.put(trio.target, bytes(size), headers=headers | {"if-none-match": "*"}),
            "PreconditionFailed",
        ),
    ]
    for whole, code in asked:
        sock = trio.wire.connect()
        sock.sendall(whole[: len(whole) - size])
        assert read_answer(sock, "PUT").code == code
        assert sock.recv(1) == b""  # nobody could tell where the next request begins
    assert trio.stored(trio.target) == b"there"


@pytest.mark.parametrize("size", [10, 60_000, 2 * MIB])
def test_bodies_that_are_not_what_was_signed(trio: Trio, size: int) -> None:
    target, body = trio.target_of("wrong"), os.urandom(size)
    whole = trio.wire.put(target, body)
    answer = trio.wire.exchange(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert answer.code == "XAmzContentSHA256Mismatch"
    assert trio.stored(target) is None


@pytest.mark.parametrize("size", [10, 60_000, 2 * MIB])
def test_chunked_bodies(trio: Trio, size: int) -> None:
    target, body = trio.target_of("chunks"), os.urandom(size)
    payload = {"payload_hash": "UNSIGNED-PAYLOAD", "headers": {"transfer-encoding": "chunked"}}
    head = trio.wire.head("PUT", target, **payload)  # type: ignore[arg-type]
    half = size // 2
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:half], body[half:]))
    assert trio.wire.exchange(head + pieces + b"0\r\n\r\n").status == 200
    assert trio.stored(target) == body
    sent = chunked_body([body])
    headers = {
        "content-encoding": "aws-chunked",
        "content-length": str(len(sent)),
        "x-amz-decoded-content-length": str(size),
    }
    head = trio.wire.head("PUT", target, headers=headers, payload_hash="STREAMING-UNSIGNED-PAYLOAD-TRAILER")
    assert trio.wire.exchange(head + sent).status == 200
    assert trio.stored(target) == body


@pytest.mark.parametrize("sent", [0, 30_000, 2 * MIB])
def test_a_client_that_goes_away_in_the_middle_of_its_body(trio: Trio, sent: int) -> None:
    target, before = trio.target_of("gone"), trio.beside.do(lambda: _uploading(trio))
    whole = trio.wire.put(target, bytes(4 * MIB))
    sock = trio.wire.connect()
    sock.sendall(whole[: len(whole) - 4 * MIB + sent])
    sock.close()
    trio.until(lambda: _uploading(trio) == before)
    assert trio.stored(target) is None


def _uploading(trio: Trio) -> int:
    """Wires that are at work."""
    return sum(1 for wire in trio.asked.peers._open if not wire.closed and wire._exchange is not None)


# --- x-mesh-hop ---------------------------------------------------------------------------------------


def _authorization(head: bytes) -> str:
    lines = head.decode().split("\r\n")
    return next(line.partition(": ")[2] for line in lines if line.lower().startswith("authorization:"))


def _with_hop(head: bytes, value: str) -> bytes:
    return head[:-2] + f"{HOP_HEADER}: {value}\r\n\r\n".encode()


def _ask(trio: Trio, node: Running, value: Callable[[str], str], target: str = "") -> Any:
    """The answer of `node` to a GET that says it was passed on."""
    wire = Wire(node.member.endpoint, *ROOT)
    head = wire.head("GET", target or trio.target)
    answer = wire.exchange(_with_hop(head, value(_authorization(head))), method="GET")
    wire.close()
    return answer


@pytest.mark.parametrize(
    "value",
    [
        "",
        ",",
        "n1,1,1,127.0.0.1,0,,,1,00",
        "n1,1,1,127.0.0.1,0,,," + "9" * 5000 + "," + "0" * 64,
        "n1,-1,x,127.0.0.1,0,,,now," + "f" * 64,
        "é" * 100,
        ",".join(["x"] * 500),
    ],
)
def test_forged_hops(trio: Trio, value: str) -> None:
    for node in trio.beside.nodes:
        answer = _ask(trio, node, lambda _: value)
        assert (answer.status, answer.code) == (403, "AccessDenied")


def test_hops_hold_for_one_request(trio: Trio) -> None:
    trio.wire.call("PUT", trio.target, b"there")
    other = trio.target_of("other")
    hop = Hop("n1", trio.asked.node.mesh.current_map().version, 0, "10.0.0.9", secure=True)

    def write(method: str, target: str, authorization: str | None = None) -> Callable[[str], str]:
        return lambda real: trio.signed_hop(hop, method, target, real if authorization is None else "")

    assert _ask(trio, trio.owner, write("GET", trio.target)).body == b"there"
    for wrong in (
        write("GET", other),
        write("PUT", trio.target),
        write("GET", trio.target + "?x"),
        write("GET", trio.target, ""),
    ):
        assert _ask(trio, trio.owner, wrong).status == 403


@pytest.mark.parametrize("minutes", [-6, 6])
def test_hops_of_another_time(trio: Trio, minutes: int) -> None:
    hop = Hop("n1", 1, 0, "10.0.0.9", secure=True)
    then = ManualClock(trio.asked.node.clock.now_ms() + minutes * 60_000)
    hops = HopSigner(trio.asked.peers._derive, then)
    answer = _ask(trio, trio.owner, lambda real: hops.sign_hop(hop, "GET", trio.target, real))
    assert answer.status == 503
    assert b"clocks" in answer.body
    assert "x-mesh-skewed" in {name.lower() for name in answer.headers}


def test_what_was_passed_on_is_never_passed_on_again(trio: Trio) -> None:
    """A node that is not the one says so, with its map's version; so nothing goes round."""
    trio.wire.call("PUT", trio.target, b"there")
    version = trio.third.node.mesh.current_map().version
    for node in (trio.asked, trio.third):
        hop = Hop("n2", version, 0, "10.0.0.9", secure=True)
        for method in ("GET", "PUT"):
            wire = Wire(node.member.endpoint, *ROOT)
            head = wire.head(method, trio.target, headers={"content-length": "0"} if method == "PUT" else {})
            value = trio.signed_hop(hop, method, trio.target, _authorization(head))
            answer = wire.exchange(_with_hop(head, value), method=method)
            wire.close()
            assert (answer.status, answer.headers["x-mesh-map"]) == (421, str(version))
    assert trio.stored(trio.target) == b"there"


def test_a_hop_brings_no_rights(trio: Trio) -> None:
    hop = Hop("n1", 1, 0, "127.0.0.1", secure=True)
    wire = Wire(trio.owner.member.endpoint, ROOT[0], "another secret")
    head = wire.head("GET", trio.target)
    value = trio.signed_hop(hop, "GET", trio.target, _authorization(head))
    assert wire.exchange(_with_hop(head, value), method="GET").code == "SignatureDoesNotMatch"
    anonymous = f"GET {trio.target} HTTP/1.1\r\nHost: {wire.host}\r\n\r\n".encode()
    value = trio.signed_hop(hop, "GET", trio.target, "")
    assert wire.exchange(_with_hop(anonymous, value), method="GET").code == "AccessDenied"
    wire.close()
