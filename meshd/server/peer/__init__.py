"""Endpoint and handlers for calls from other nodes, under `/-/peer/`.

Law: every call is authenticated as a node of this cluster; a handler parses, calls the service of its
subject and answers. Handlers stay in the server layer, because they use aiohttp's request and response
types.
"""
