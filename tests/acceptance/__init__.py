"""What a user would see, on the real cluster."""

import pytest

# A failed assertion in a scenario shows its values, as one in a test module does.
pytest.register_assert_rewrite("tests.acceptance.scenarios")
