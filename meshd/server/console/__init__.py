"""The web console under `/-/console/`: pages, sessions, and requests of a browser that the node signs.

It has no API of its own for data: a request of the page is signed with the session's key, and then takes the
way of every other signed request, through the S3 endpoint or the native routes, on this node or another. So
the page can do what the key may do, and nothing else. The built front end is in `files/`; its sources are in
`console/`.
"""
