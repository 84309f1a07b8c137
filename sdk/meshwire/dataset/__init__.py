"""Datasets: fields, samples, archive indexes, snapshots and expressions over samples.

Law: an object's names, sizes and ETags decide; nothing here parses the content of a sample.
"""
