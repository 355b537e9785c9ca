"""Brokers for workers; their database and files: tests/integration/conftest.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.servers.kafka import KafkaServer
from tests.support.servers.rabbitmq import RabbitmqServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitmqServer]:
    """A RabbitMQ server for the session."""
    server = RabbitmqServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaServer]:
    """A Kafka broker for the session."""
    server = KafkaServer()
    yield server
    server.close()
