"""How long a reader of what is cached waits for an origin's word that it is still so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshd.origins.client.origin_api import ObjectFacts, OriginDownError, OriginMissingError
from meshd.origins.read_through import Revalidator
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BUCKET: Any = SimpleNamespace(name="b", created_ms=1)
OTHER: Any = SimpleNamespace(name="c", created_ms=1)
OLD, NEW = ObjectFacts(1, "old", 1), ObjectFacts(1, "new", 2)
PATIENCE = 3.0


class Origin:
    """As a crew that asks one. It answers when `say` is called, with that."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[ObjectFacts]] = []

    def worker_for(self, *_: str) -> Origin:
        return self

    async def check_origin(self, *_: Any) -> ObjectFacts:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def say(self, what: ObjectFacts | Exception) -> None:
        if isinstance(what, Exception):
            self.asked[-1].set_exception(what)
        else:
            self.asked[-1].set_result(what)
        await _turns()


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time goes on by hand: whoever sleeps in it is woken at once, and late."""

    now = 0.0

    def time(self) -> float:
        return self.now


def counted() -> float:
    (metric,) = metrics.origin_unanswered.collect()
    return float(next(sample.value for sample in metric.samples if sample.name.endswith("_total")))


def played(act: Callable[[Revalidator, Origin, Clock], Awaitable[None]]) -> None:
    loop, origin = Clock(), Origin()
    found: Any = Revalidator

    async def play() -> None:
        questions = found(origin, PATIENCE)
        await act(questions, origin, loop)
        await questions.aclose()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play())


async def later(loop: Clock, seconds: float) -> None:
    await _turns()
    loop.now += seconds
    await _turns()


def test_an_origin_that_answers_in_time_is_believed() -> None:
    async def act(questions: Revalidator, origin: Origin, loop: Clock) -> None:
        reading = asyncio.ensure_future(questions.current_facts(BUCKET, "k", OLD))
        await later(loop, PATIENCE - 0.1)
        assert not reading.done()
        await origin.say(NEW)
        assert await reading == NEW
        for wrong, said in ((OriginMissingError("gone"), None), (OriginDownError("down"), OLD)):
            reading = asyncio.ensure_future(questions.current_facts(BUCKET, "k", OLD))
            await later(loop, 0.1)
            await origin.say(wrong)
            if said is None:
                with pytest.raises(OriginMissingError):
                    await reading
            else:
                assert await reading == said

    played(act)


def test_one_waits_for_a_silent_origin_and_nobody_after_it() -> None:
    async def act(questions: Revalidator, origin: Origin, loop: Clock) -> None:
        before = counted()
        reading = asyncio.ensure_future(questions.current_facts(BUCKET, "k", OLD))
        await later(loop, PATIENCE + 0.1)
        assert await reading == OLD
        for key in ("k", "l", "m"):
            assert await questions.current_facts(BUCKET, key, OLD) == OLD  # the clock stands still
        assert len(origin.asked) == 1
        await origin.say(OriginDownError("no answer in time"))
        assert await questions.current_facts(BUCKET, "l", OLD) == OLD
        await _turns()
        assert len(origin.asked) == 2  # behind
        assert counted() == before + 5
        await origin.say(NEW)
        reading = asyncio.ensure_future(questions.current_facts(BUCKET, "l", OLD))
        await later(loop, 0.1)
        assert len(origin.asked) == 3  # it answers again, and is waited for
        await origin.say(NEW)
        assert await reading == NEW

    played(act)


def test_what_is_not_cached_is_waited_for_and_another_bucket_is_another_matter() -> None:
    async def act(questions: Revalidator, origin: Origin, loop: Clock) -> None:
        reading = asyncio.ensure_future(questions.current_facts(BUCKET, "k", OLD))
        await later(loop, PATIENCE + 0.1)
        assert await reading == OLD
        cold = asyncio.ensure_future(questions.current_facts(BUCKET, "cold", None))
        other = asyncio.ensure_future(questions.current_facts(OTHER, "k", OLD))
        await later(loop, PATIENCE - 0.1)
        assert not cold.done()
        assert not other.done()
        await origin.say(NEW)
        assert await other == NEW
        await later(loop, 1000)
        assert not cold.done()
        origin.asked[1].set_result(NEW)
        assert await cold == NEW

    played(act)
