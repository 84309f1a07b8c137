"""Composition root: builds the store, control state, services and routes of one process.

Everything is constructed here and passed down; no module below looks anything up. It reads top-down:
`node_context` opens the node; `data_services`, `origins`, `cluster` and `services` build the services from
it, and `routes` the routes.
"""
