"""What a command works on: named wins, a kubectl plugin means the cluster, nothing is guessed."""

from __future__ import annotations

import pytest

from outbox_cli.console import Console, Format
from outbox_cli.context import Context
from outbox_cli.errors import UsageError
from outbox_cli.main import build_parser

SERVICE = {"PGSERVICE": "shop"}


def parse(*arguments, environment=SERVICE, plugin=False):
    options = build_parser(plugin=plugin).parse_args(["status", *arguments])
    return Context(options, Console(Format.TABLE, assume_yes=False), environment, plugin)


@pytest.mark.parametrize(
    ("arguments", "environment", "plugin", "cluster"),
    [
        pytest.param(("--connection", "d"), {}, False, False, id="a Secret's files"),
        pytest.param(("--connections", "d"), {}, True, False, id="the files win over the plugin"),
        pytest.param((), SERVICE, False, False, id="libpq's environment"),
        pytest.param((), SERVICE, True, True, id="the plugin wins over the environment"),
        pytest.param(("-n", "shop"), SERVICE, False, True, id="a namespace wins over the environment"),
        pytest.param(("-A",), {}, False, True, id="every namespace"),
        pytest.param(("--context", "prod"), {}, False, True, id="a context"),
    ],
)
def test_whether_a_cluster_is_meant(arguments, environment, plugin, cluster):
    assert parse(*arguments, environment=environment, plugin=plugin).means_cluster() is cluster


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param((), "which database?", id="nothing says"),
        pytest.param(("--connection", "d", "-n", "shop"), "which of the two", id="both are named"),
    ],
)
def test_no_place_is_guessed(arguments, said):
    with pytest.raises(UsageError, match=said):
        parse(*arguments, environment={}).means_cluster()


@pytest.mark.parametrize(
    ("arguments", "plugin"),
    [
        pytest.param(("-f", "orders.yaml"), True, id="a manifest"),
        pytest.param(("--schema", "other"), True, id="a schema"),
        pytest.param(("-n", "shop", "--schema", "other"), False, id="a schema beside a namespace"),
    ],
)
def test_what_only_a_database_knows_is_not_dropped_in_a_cluster(arguments, plugin):
    with pytest.raises(UsageError, match="-f and --schema are about a database, and this means a cluster"):
        parse(*arguments, plugin=plugin).means_cluster()


def test_the_outbox_without_a_manifest_is_the_products_own_table():
    context = parse("orders", "--schema", "other")
    assert (context.schema, context.needed_processor, context.source.table) == ("other", "orders", None)


def test_a_processor_has_to_be_named_where_one_is_needed():
    with pytest.raises(UsageError, match="which processor"):
        _ = parse().needed_processor


def test_a_manifest_says_schema_table_and_processor(tmp_path):
    file = tmp_path / "orders.yaml"
    file.write_text(
        "apiVersion: outbox-operator.dev/v1alpha1\nkind: OutboxProcessor\nmetadata: {name: orders}\nspec:\n"
        "  processorId: sales/orders\n  source: {connection: {secretRef: {name: db}}, schemaName: mine,\n"
        "    table: {schemaName: public, name: log}}\n  target: {log: {}}\n"
    )
    context = parse("-f", str(file))
    assert (context.schema, context.needed_processor) == ("mine", "sales/orders")
    assert context.source.table is not None
    assert context.source.table.name == "log"
    with pytest.raises(UsageError, match="not invoices"):
        _ = parse("invoices", "-f", str(file)).processor_id
    with pytest.raises(UsageError, match="schemaName mine"):
        _ = parse("-f", str(file), "--schema", "outbox").schema
