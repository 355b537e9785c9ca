"""Finding the user's function, and telling what is wrong with it. Real files, real imports."""

from __future__ import annotations

import sys

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason
from outbox_core.spec import PythonTarget
from outbox_worker.handlers.handler import HandlerModule, describe, summary


@pytest.fixture
def home(tmp_path):
    yield tmp_path
    sys.path[:] = [each for each in sys.path if each != str(tmp_path)]
    for name in [name for name in sys.modules if name.startswith("shop_")]:
        del sys.modules[name]


def module(home, name="shop_orders", **fields):
    return HandlerModule(PythonTarget(module=name, **fields), home)


def test_a_change_is_noticed_and_imported_with_its_helpers(home):
    (home / "shop_prices.py").write_text("RATE = 1\n")
    (home / "shop_orders.py").write_text(
        "from shop_prices import RATE\ndef handle(batch, connection):\n    return RATE\n"
    )
    handler = module(home)
    assert not handler.changed()
    assert handler.function()(None, None) == 1
    assert not handler.changed()
    (home / "shop_prices.py").write_text("RATE = 22\n")
    assert handler.changed()
    assert handler.function()(None, None) == 22
    assert not handler.changed()


def test_a_broken_change_is_refused_until_it_is_mended(home):
    handler = module(home)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="there is no module shop_orders") as caught:
            handler.function()
    assert caught.value.reason is Reason.HANDLER_INVALID
    (home / "shop_orders.py").write_text("def handle(batch, connection): return 'mended'\n")
    assert handler.changed()
    assert handler.function()(None, None) == "mended"


def test_a_module_that_is_named_as_its_file_is_named_as_a_module(home):
    (home / "shop_orders.py").write_text("def handle(batch, connection): pass\n")
    (home / "shop_prices.py").write_text("RATE = 21\n")
    with pytest.raises(ConfigurationError, match=r"no module shop_orders\.py: .* has shop_orders, shop_prices;"):
        module(home, "shop_orders.py", config_map_ref={"name": "code"}).function()


def test_a_handler_of_the_image_is_found_too(home):
    function = module(home, "textwrap", function="fill")
    with pytest.raises(ConfigurationError, match=r"called as handle|no function"):
        module(home, "textwrap").function()
    assert function.function()("batch", 70) == "batch"


FAILING = """
def handle(batch, connection):
    return helper(batch)

def helper(batch):
    raise KeyError("customer")
"""


def test_a_traceback_begins_in_the_handler(home):
    (home / "shop_orders.py").write_text(FAILING)
    function = module(home).function()
    with pytest.raises(KeyError) as caught:
        function([], None)
    text = describe(caught.value, home)
    assert text.startswith(f'  File "{home}/shop_orders.py", line 3, in handle')
    assert text.endswith("KeyError: 'customer'")
    assert summary(caught.value, home) == "KeyError: 'customer' (shop_orders.py:6)"


def test_a_long_text_is_cut(home):
    (home / "shop_orders.py").write_text("def handle(batch, connection): raise ValueError('x' * 100_000)\n")
    function = module(home).function()
    with pytest.raises(ValueError, match="xxx") as caught:
        function([], None)
    assert len(describe(caught.value, home)) <= 1500
    assert len(summary(caught.value, home)) < 500
