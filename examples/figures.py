"""What every example prints at its end: rate, stall share, and a hash of the samples it saw.

Law: the hash is a sum over rows, so it is the same whatever the ranks, their number, or the stops in between.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import meshsdk as mesh

PAD = 3
_MODULUS = 1 << 64


class SeenRows:
    """Adds up 64 bits of BLAKE2b of each row: its position and the bytes of its dense fields, pads left out.

    `total` goes into the checkpoint beside the loader's state. It costs about a second a gigabyte: in a job
    of yours it is for looking, not for every step.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total

    def add(self, batch: mesh.Batch) -> None:
        fields = [np.asarray(value) for _, value in sorted(batch.items()) if hasattr(value, "shape")]
        for row in range(batch.rows):
            if batch.status[row] == PAD:
                continue
            digest = hashlib.blake2b(int(batch.positions[row]).to_bytes(8, "little"), digest_size=8)
            for field in fields:
                digest.update(np.ascontiguousarray(field[row]).tobytes())
            self.total = (self.total + int.from_bytes(digest.digest(), "little")) % _MODULUS

    def of_all_ranks(self) -> int:
        """The sum over all ranks; a collective, where there are several."""
        low, high = sum_over_ranks(self.total & 0xFFFFFFFF, self.total >> 32)
        return (int(low) + (int(high) << 32)) % _MODULUS


_sums: list[torch.Tensor] = []


def sum_over_ranks(*values: float) -> list[float]:
    """Each value added up over the ranks (float64); as it is in a lone process.

    The tensor is kept for ever: a thread of gloo lets go of it a moment after the call has returned and would
    need the interpreter if it were the last to do so, which a main thread that ends the group does not give.
    """
    if not dist.is_initialized():
        return list(values)
    if not _sums:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        _sums.append(torch.zeros(8, dtype=torch.float64, device=device))
    _sums[0][: len(values)] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(_sums[0])
    added: list[float] = _sums[0][: len(values)].tolist()
    return added


def report(loader: mesh.Loader, seen: int, **more: object) -> None:
    """One line of this process's figures."""
    stats = loader.stats()
    rest = "".join(f" {name}={value}" for name, value in more.items())
    print(
        f"samples/s={stats.samples_per_second:.0f} stall={stats.wait_share:.1%} hash={seen:016x}{rest}",
        flush=True,
    )
