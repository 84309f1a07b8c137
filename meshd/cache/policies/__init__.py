"""Admission and eviction: the policy of a store (`segmented`), and those it is measured against.

Law: deterministic; the same calls give the same decisions in every process.
Seam: `interface.Policy`. A policy is one file and one line of `simulating.POLICIES`.
"""
