"""User module table: the pushed builds of each module, with time and author.

Law: a build is content, stored among the node's assets; this table only names builds. Every write is
conditional, so that of two simultaneous pushes both count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.control.cached_topic import CachedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.control_api import ControlStore

TOPIC: Final = "modules"


class Build(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pushed content of a module. `version` is `sha256:HEX`, `source` the hash of the file alone. A
    `draft` is used only by version, never by name."""

    version: str
    source: str
    pushed_ms: int
    pushed_by: str
    ops: tuple[str, ...]
    draft: bool = False


class PushedModule(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module and its builds, latest last."""

    name: str
    builds: tuple[Build, ...] = ()

    @property
    def latest(self) -> Build | None:
        """The build for a plan that names no version."""
        return next((build for build in reversed(self.builds) if not build.draft), None)


_decode = msgspec.json.Decoder(PushedModule).decode


class ModuleTable:
    """Modules by name. Reads are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode)

    def __repr__(self) -> str:
        return f"<ModuleTable {self._documents!r}>"

    def get(self, name: str) -> PushedModule | None:
        return self._documents.current().get(name)

    def list_all(self) -> Mapping[str, PushedModule]:
        """Returns every module by name."""
        return self._documents.current()

    async def update_module(self, name: str, decide: Callable[[PushedModule], PushedModule]) -> PushedModule:
        """Replaces a module (an empty one if there is none) by what `decide` returns, durably and atomically;
        a module without builds is removed. `decide` may be called repeatedly, and may raise."""
        result = PushedModule(name)

        def change(present: PushedModule | None) -> PushedModule | None:
            nonlocal result
            result = decide(present or PushedModule(name))
            return result if result.builds else None

        await self._documents.update(name, change)
        return result
