"""Workload: what is trained on what, and how fast.

Law: plain numbers in units that the names say; bytes are those of stored samples unless a name says other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from meshsdk.errors import ConfigurationError
from meshwire.strict_json import suggestion

Order = Literal["blocks", "full"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset, its ops, and the jobs that train on it.

    Attributes:
        data_bytes, samples: of one copy of the data, as stored.
        epochs: of each job. jobs: at the same time. sharing: all jobs read and prepare a sample once.
        gpus: of one job; 0: as many as needed. bytes_per_gpu_second: stored bytes that one GPU consumes.
        order: `blocks` (`mesh.Blocks`) or `full` (a full shuffle).
        shard_bytes, block_shards: size of a shard, and shards of a block.
        read_ahead_share: memory for read-ahead of a full shuffle, as a share of the data.
        cpu_seconds_per_sample: of all ops, on one core. delivered_bytes_per_sample: of what a job receives.
        kept_bytes_per_sample: of a decoded sample as a node keeps it; 0: it cannot be kept.
        kept_cpu_seconds_per_sample: of the ops that are left for a kept one.
        deadline_seconds: all epochs must end by then. budget_usd: for hardware. Both None: not given.
    """

    data_bytes: float
    samples: float
    epochs: int = 1
    jobs: int = 1
    sharing: bool = False
    gpus: int = 0
    bytes_per_gpu_second: float = 0.0
    order: Order = "blocks"
    shard_bytes: float = 1e9
    block_shards: int = 8
    read_ahead_share: float = 0.05
    cpu_seconds_per_sample: float = 0.0
    delivered_bytes_per_sample: float = 0.0
    kept_bytes_per_sample: float = 0.0
    kept_cpu_seconds_per_sample: float = 0.0
    deadline_seconds: float | None = None
    budget_usd: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError."""
        for name in ("data_bytes", "samples", "epochs", "jobs", "shard_bytes", "block_shards"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise ConfigurationError(f"{each.name} is {value}; it must be a number from 0 up")
        if self.order not in get_args(Order):
            raise ConfigurationError(
                f"order is {self.order!r}; it must be one of {', '.join(get_args(Order))}"
            )
        if not 0 < self.read_ahead_share <= 1:
            raise ConfigurationError("read_ahead_share must be above 0 and at most 1")
        if self.deadline_seconds is not None and not self.deadline_seconds > 0:
            raise ConfigurationError("deadline_seconds must be above 0")
        if not self.appetite_bytes_per_second and self.deadline_seconds is None:
            raise ConfigurationError(
                "give the number of GPUs and what each consumes (--gpus with --gpu-rate or "
                "--gpu-samples), or a deadline (--within)"
            )

    @property
    def bytes_per_sample(self) -> float:
        """Stored bytes of a sample, on average."""
        return self.data_bytes / self.samples

    @property
    def delivered_bytes(self) -> float:
        """Bytes of a sample as a job receives it."""
        return self.delivered_bytes_per_sample or self.bytes_per_sample

    @property
    def appetite_bytes_per_second(self) -> float:
        """What the GPUs of one job consume; 0 if the number of GPUs is not given."""
        return self.gpus * self.bytes_per_gpu_second

    @property
    def demand_bytes_per_second(self) -> float:
        """What one job shall receive: what its GPUs consume, or no more than the deadline requires."""
        if self.deadline_seconds is None:
            return self.appetite_bytes_per_second
        required = self.data_bytes * self.epochs / self.deadline_seconds
        return min(required, self.appetite_bytes_per_second) if self.appetite_bytes_per_second else required

    @property
    def samples_per_second(self) -> float:
        """What one job shall receive, in samples."""
        return self.demand_bytes_per_second / self.bytes_per_sample

    @property
    def prepared_per_second(self) -> float:
        """Samples that are read and prepared, for all jobs."""
        return self.samples_per_second * (1 if self.sharing else self.jobs)


def workload_of(values: dict[str, Any]) -> Workload:
    """Make a workload of named values. Raises ConfigurationError, which names the value."""
    known = {field.name for field in fields(Workload)}
    hints = get_type_hints(Workload)
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(f"there is no value {name!r}{suggestion(name, known)}")
        wanted = hints[name]
        if wanted is bool:
            fits = isinstance(value, bool)
        elif name == "order":
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, int if wanted is int else (int, float)) and not isinstance(value, bool)
        if not fits:
            raise ConfigurationError(f"{name} is {value!r}, which is not of the right type")
    missing = [name for name in ("data_bytes", "samples") if name not in values]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} missing: how large is the data, in how many samples? Give --data with "
            "--sample-bytes or --samples, or --like URL to measure a dataset"
        )
    return Workload(**values)
