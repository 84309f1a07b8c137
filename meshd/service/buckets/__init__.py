"""Buckets: made, found, listed, removed; their settings, lifecycle rules and number of copies.

Law: a bucket stands in the control store, and its change is known on every node before its author hears of it
(`news`). What a lifecycle rule means is decided purely, in `semantics.expiry`.
"""
