"""Sizing: what to buy for a training job, what bounds it, and what it costs (`mesh sizing`).

Law: pure arithmetic over a workload, a design and assumptions; nothing is measured here, no file is read
except the assumptions that ship with the package.
"""
