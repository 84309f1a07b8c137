"""Control state: buckets, identities, jobs, deleted documents and the cluster map.

Law: one interface (`control_api.ControlStore`), three engines (`embedded`, `etcd`, `kubernetes`) and
one test suite that binds them all. No object data, ever. The typed tables depend on the interface and
never on an engine.
"""
