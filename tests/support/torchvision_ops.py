"""torchvision beside a torch that it was not built for.

Its wheels belong to a torch with CUDA, which is not in the development environment. Only its compiled ops
need that torch; transforms and readers do not use them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_torchvision_ops() -> Iterator[None]:
    """Imports of torchvision do not describe its compiled ops to torch, which may not have them."""
    known: Any = torch.library.register_fake

    def register_fake(name: Any, *args: Any, **more: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return known(name, *args, **more)

    torch.library.register_fake = register_fake
    try:
        yield
    finally:
        torch.library.register_fake = known
