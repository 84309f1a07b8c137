"""Frame assembly: from a frame address to a finished frame in shared memory.

Law: a frame is a pure function of its address. It is built once for all callers and cached while there
is room. Assembly knows no HTTP, users or codecs; any `Renderer` renders its rows.
"""
