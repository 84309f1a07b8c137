"""The store and its loaders as other libraries expect them: one module a library, imported by its users only.

Law: an adapter translates, and decides nothing: bytes come of `Client`, batches of `Loader`. What it adapts
to is an optional package, imported by that module alone; nothing in `meshsdk` imports an adapter.
"""
