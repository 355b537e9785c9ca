"""The target's Secret, as files."""

from __future__ import annotations

from functools import partial
from traceback import format_exception

import pytest
from pamqp import commands

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.amqp.broker import STREAM, open_socket, read_broker_address
from outbox_worker.targets.librdkafka.settings import read_broker_settings


def write(directory, **keys):
    for name, value in keys.items():
        (directory / name.replace("_crt", ".crt")).write_text(value)
    return directory


def test_a_uri_is_decoded(tmp_path):
    address = read_broker_address(write(tmp_path, uri="amqp://a%40b:p%2Fw@broker.example:5673/shop%2Feu\n"))
    assert (address.host, address.port, address.username, address.password, address.vhost, address.tls) == (
        "broker.example", 5673, "a@b", "p/w", "shop/eu", False,
    )  # fmt: skip
    assert "p/w" not in repr(address)
    assert str(address) == "broker.example:5673"


@pytest.mark.parametrize(
    ("keys", "port", "tls"),
    [({"uri": "amqp://h"}, 5672, False), ({"uri": "amqps://h"}, 5671, True), ({"host": "h"}, 5672, False),
     ({"host": "h", "ca_crt": "PEM"}, 5671, True), ({"host": "h", "port": "1234"}, 1234, False)],
)  # fmt: skip
def test_ports_and_tls_follow_from_what_is_there(tmp_path, keys, port, tls):
    address = read_broker_address(write(tmp_path, **keys))
    assert (address.port, address.tls, address.vhost) == (port, tls, "/")


@pytest.mark.parametrize(
    ("keys", "message"),
    [({}, "no file `uri` and no file `host`"), ({"uri": "http://h"}, "must look like amqp://"),
     ({"uri": "amqp://u:s3cret#word@h"}, "is not a URI"), ({"uri": "u:s3cret@h"}, "must look like amqp://"),
     ({"host": "h", "port": "many"}, "`port` is not a port number"),
     ({"host": "h", "vhost": "v" * 128}, "`vhost` is longer than the 127 characters that AMQP allows")],
)  # fmt: skip
def test_what_is_wrong_is_named_without_the_secret(tmp_path, keys, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_broker_address(write(tmp_path, **keys))
    assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID
    assert "s3cret" not in "".join(format_exception(caught.value))


def test_an_authority_that_is_no_certificate(tmp_path):
    address = read_broker_address(write(tmp_path, host="h", ca_crt="not a certificate"))
    with pytest.raises(ConfigurationError, match=r"`ca.crt` holds no PEM certificate"):
        open_socket(address, 1.0)


def test_a_virtual_host_may_be_as_long_as_the_protocol_allows(tmp_path):
    directory = write(tmp_path, host="h", vhost="v" * 127)
    address = read_broker_address(directory)
    assert commands.Connection.Open(virtual_host=address.vhost).virtual_host == "v" * 127
    write(directory, vhost="v" * 128)
    assert len(read_broker_address(directory, STREAM).vhost) == 128


@pytest.mark.parametrize("host", ["a..b", ".x", "x" * 64 + ".svc", "nowhere.invalid", "a b"])
def test_a_host_that_cannot_be_is_a_broker_that_cannot_be_reached(tmp_path, host):
    with pytest.raises(TransientError, match="cannot be reached") as caught:
        open_socket(read_broker_address(write(tmp_path, host=host)), 1.0)
    assert caught.value.reason is Reason.TARGET_UNAVAILABLE


@pytest.mark.parametrize(
    ("keys", "port", "tls"),
    [({"uri": "rabbitmq-stream://h"}, 5552, False), ({"uri": "rabbitmq-stream+tls://h"}, 5551, True),
     ({"host": "h"}, 5552, False), ({"host": "h", "ca_crt": "PEM"}, 5551, True)],
)  # fmt: skip
def test_streams_have_schemes_and_ports_of_their_own(tmp_path, keys, port, tls):
    address = read_broker_address(write(tmp_path, **keys), STREAM)
    assert (address.port, address.tls) == (port, tls)


def test_what_is_wrong_names_the_target_that_it_is_of(tmp_path):
    with pytest.raises(ConfigurationError, match=r"target\.rabbitmqStream\..*must look like rabbitmq-stream://"):
        read_broker_address(write(tmp_path, uri="amqp://h"), STREAM)


@pytest.mark.parametrize(
    ("read", "keys"),
    [(read_broker_address, {"host": "h"}), (partial(read_broker_address, protocol=STREAM), {"host": "h"}),
     (read_broker_settings, {"bootstrapServers": "h:9092"})],
)  # fmt: skip
def test_a_user_in_the_file_of_a_database_is_refused(tmp_path, read, keys):
    """Without a word it would be the user guest, or no login."""
    with pytest.raises(ConfigurationError, match=r"has a file `user`.*rename `user` to `username`") as caught:
        read(write(tmp_path, **keys, user="shop"))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID
    read(write(tmp_path, **keys, username="shop", password="p"))


def test_a_user_that_says_nothing_of_this_login_is_no_mistake(tmp_path):
    assert read_broker_address(write(tmp_path, uri="amqp://shop:p@h", user="else")).username == "shop"
    assert read_broker_settings(write(tmp_path, bootstrapServers="h:9092", user="\n")).username is None
    (tmp_path / "user").unlink()
    (tmp_path / "user").mkdir()
    assert read_broker_settings(tmp_path).username is None


def test_the_mark_with_which_editors_begin_a_file_is_not_part_of_its_text(tmp_path):
    directory = write(tmp_path, uri="\ufeffamqp://shop:p@h\r\n")
    assert read_broker_address(directory).username == "shop"
