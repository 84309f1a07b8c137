"""Frames: batches and samples as safetensors-compatible bytes, and the column documents built on them.

Law: a reader's memory is bounded by the bytes it is given, and any bytes give a frame or an error.
"""
