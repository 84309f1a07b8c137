"""Control state: buckets, identities, later views and the cluster map; small, versioned, watched.

Law: one small interface (`interface.ControlStore`), several engines (`memory`, `embedded`, `etcd`,
`kubernetes`), one shipped suite that binds them all (`meshd.testing.control_suite`). No object data, ever.
Typed tables (`buckets`, `identities`) stand on the interface and never know the engine.
"""
