"""The daemon of a storage node: S3 store, preprocessing, batches by address.

Law: layers, top to bottom; a module imports only from layers below its own: cli, process, server, reads,
origins, jobs, views, batches, datasets | objects, peer_reads, documents, auth, core | cluster,
transform, control, store, rpc, telemetry, util, config, errors. `make check` enforces them.
"""
