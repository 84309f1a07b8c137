"""Datasets: snapshots with fields and ops, batches, splits, mixes and preflight.

Law: values and single samples only; the loader loads. This package never imports `loader`.
"""
