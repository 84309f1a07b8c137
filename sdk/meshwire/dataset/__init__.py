"""Datasets: fields, samples, archive indexes, snapshots and expressions over samples.

Law: only names, sizes and ETags of objects matter; nothing here parses the content of a sample.
"""
