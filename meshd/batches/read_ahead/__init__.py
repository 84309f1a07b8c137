"""Read-ahead: reads of coming batches from rotational disks, sorted and joined.

Law: a hint, never a source. Bytes go to the page cache alone; a batch is built from the same files, with
the same checks, whether or not its bytes were read ahead. Imports nothing of `batches.assembly`.
"""
