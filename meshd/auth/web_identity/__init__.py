"""Web identity: an OpenID Connect token is validated and exchanged for temporary credentials of a role.

Law: only signatures by keys of a registered provider count; a header's own key, URL or certificate is
ignored. No token, and no part of one that was not validated, appears in a log or an error. Parsing and
validation do no I/O; keys are fetched by `issuer_client` alone, in tasks of their own.
"""
