"""Takes out the guards of the list one by one: python -m tests.mutations [PYTEST'S OPTIONS]"""

from __future__ import annotations

import sys

import pytest

from tests.mutations.guards import MUTATIONS

files = dict.fromkeys(mutation.test.partition("::")[0] for mutation in MUTATIONS)
sys.exit(pytest.main(["-p", "tests.mutations.plugin", *files, *sys.argv[1:]]))
