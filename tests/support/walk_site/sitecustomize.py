"""On the path of a node whose requests are recorded: each of its children records what it executes."""

from tests.support.walks import record_children

record_children()
