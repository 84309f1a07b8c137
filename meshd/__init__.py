"""The daemon of a storage node: S3 store, preprocessing, addressed batches.

Law: layers, top to bottom, each importing only those below it: testing, cli, runtime, web, service,
assembly | transform | cluster, store | origin | control, cache, net, telemetry, kit, config, errors. `make
check` enforces them.
"""
