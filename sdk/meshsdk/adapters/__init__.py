"""Adapters: the store and its loaders in the interfaces of other libraries, one module per library.

Law: an adapter translates and decides nothing; bytes come from `Client`, batches from `Loader`. Each module
imports its own optional package; nothing in `meshsdk` imports an adapter.
"""
