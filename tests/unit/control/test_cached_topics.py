"""A topic's documents in a process whose copy of the control store is behind what other processes wrote."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ControlError
from tests.support.lagging_control import LaggingControl
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.control.control_api import ControlStore


class Word(msgspec.Struct, frozen=True):
    text: str


def words_of(control: ControlStore) -> CachedTopic[Word]:
    return CachedTopic(control, "words", msgspec.json.Decoder(Word).decode)


async def _before(control: LaggingControl) -> CachedTopic[Word]:
    """The topic as a process knows it that is now behind."""
    known = words_of(control)
    await words_of(control.engine).put("one", Word("first"))
    await words_of(control.engine).put("two", Word("other"))
    control.catch_up()
    assert known.current() == {"one": Word("first"), "two": Word("other")}
    return known


async def _replace(engine: ControlStore) -> None:
    await words_of(engine).put("one", Word("second"))


async def _remove(engine: ControlStore) -> None:
    await words_of(engine).delete("one")


async def _remove_all(engine: ControlStore) -> None:
    for name in ("one", "two"):
        await words_of(engine).delete(name)


@pytest.mark.parametrize(
    ("change", "after"), [(_replace, Word("second")), (_remove, None), (_remove_all, None)]
)
def test_the_latest_document_is_waited_for(
    change: Callable[[ControlStore], Awaitable[None]], after: Word | None
) -> None:
    async def check() -> None:
        control = LaggingControl(ManualClock())
        known = await _before(control)
        await change(control.engine)
        assert (await known.get_fresh("one")) == Word("first"), "what is cached is not asked for"
        asked = asyncio.ensure_future(known.get_latest("one"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asked.done()
        control.catch_up()
        assert await asked == after

    asyncio.run(check())


def test_what_others_changed_is_not_waited_for() -> None:
    async def check() -> None:
        control = LaggingControl(ManualClock())
        known = await _before(control)
        await words_of(control.engine).put("two", Word("later"))
        assert await known.get_latest("one") == Word("first")
        assert await known.get_latest("none") is None

    asyncio.run(check())


def test_a_copy_that_stays_behind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        control = LaggingControl(ManualClock())
        known = await _before(control)
        await _replace(control.engine)
        with pytest.raises(ControlError, match="did not tell of words/one in time"):
            await known.get_latest("one")

    monkeypatch.setattr("meshd.control.cached_topic._PATIENCE", 0.05)
    asyncio.run(check())


@pytest.mark.parametrize("name", ["one", "new"])
def test_what_seems_to_be_so_already_is_written_if_it_was_changed(name: str) -> None:
    """Another process has just changed a document, or removed it; here it is put back, or removed again."""

    async def check() -> None:
        control = LaggingControl(ManualClock())
        known, elsewhere = await _before(control), words_of(control.engine)
        present = known.current().get(name)
        await elsewhere.update(name, lambda now: Word("of another") if now is None else None)
        asked = asyncio.ensure_future(known.update(name, lambda now: present))
        for _ in range(10):
            await asyncio.sleep(0)
        control.catch_up()
        assert await asked, "the later request is in force"
        assert elsewhere.current().get(name) == present
        assert not await known.update(name, lambda now: present)

    asyncio.run(check())
