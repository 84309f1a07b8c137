"""Batches as plain tuples and dicts of arrays or tensors, for training loops that accept nothing else."""

from __future__ import annotations

from meshsdk.loader.plain_batches import PlainLoader, as_dict, as_tuple, as_tuples, plain_types

__all__ = ["PlainLoader", "as_dict", "as_tuple", "as_tuples", "plain_types"]
