"""The cluster, a database and a namespace, as the acceptance tests have them."""

from tests.acceptance.conftest import cluster, room, server

__all__ = ["cluster", "room", "server"]
