"""The web console under `/-/console/`: pages, sessions, and requests of a browser that the node signs.

It has no API of its own for data: a request of the page is signed with the session's key, and then handled
like every other signed request, by the S3 endpoint or the native routes, on this node or another. The page
can therefore do exactly what the key may do. The built front end is in `files/`; its sources are in
`console/`.
"""
