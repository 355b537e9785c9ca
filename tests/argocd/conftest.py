"""The cluster and a database, as the acceptance tests have them."""

from tests.acceptance.conftest import cluster, server

__all__ = ["cluster", "server"]
