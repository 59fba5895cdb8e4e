"""Fakes, drivers, clients and servers that several tests share."""

import pytest

pytest.register_assert_rewrite("tests.support")  # these helpers also assert
