"""Plan execution: batches, from an address to a finished frame in shared memory.

Law: a frame is a pure function of its address; it is built once however many ask, and kept while there is
room. Nothing here knows HTTP, users or codecs: rows are rendered by whatever satisfies `rendering.Renderer`.
"""
