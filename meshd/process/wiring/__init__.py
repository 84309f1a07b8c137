"""Composition root: builds the store, control state, services and routes of one process.

Everything is constructed here and passed down; no module below looks anything up.
"""
