# ruff: noqa: A005 -- the older name of `documents`, until nothing imports it
"""Another name of `meshwire.s3.documents`."""

from meshwire.s3.documents import *  # noqa: F403 -- see above
