"""An operator that dies at a call: it was made, and its answer is never heard."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any


class DiedError(BaseException):
    """The operator was killed here."""


class Calls:
    """Counts; kills at `at` (0: never)."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.made = at, 0

    def tick(self) -> None:
        self.made += 1
        if self.made == self.at:
            raise DiedError


class Dying:
    """`target`, whose coroutines are counted; the effect takes place, its answer is lost."""

    def __init__(self, target: Any, calls: Calls) -> None:
        self._target, self._calls = target, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.iscoroutinefunction(found) or name == "aclose":
            return found

        @wraps(found)
        async def counted(*args: Any, **options: Any) -> Any:
            result = await found(*args, **options)
            self._calls.tick()
            return result

        return counted


class Ear:
    """Hears what loops say."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    async def record_event(self, about: dict[str, Any], reason: str, message: str, *, once: str = "") -> None:
        self.heard.append((reason, message))
