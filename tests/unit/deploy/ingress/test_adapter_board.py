"""Adapters that were loaded by hand, as several ingresses know them."""

from __future__ import annotations

import pytest

from deploy.ingress.adapter_board import AdapterBoard
from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.protocol.adapters import AdapterRef


class DictStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def read_all(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}


@pytest.mark.parametrize("others", [("name", "/other"), ("other", "/base"), ("name", "/bas")])
def test_all_learn_of_all(others: tuple[str, str]) -> None:
    store = DictStore()
    catalogs = [AdapterCatalog({}, None, 64, ["/"]) for _ in range(3)]
    boards = [AdapterBoard(catalog, "llm", "name", "/base", store) for catalog in catalogs[:2]]
    other = AdapterBoard(catalogs[2], "llm", *others, store)
    first, second = (AdapterRef(f"team/{n}", n * 4, f"/adapters/{n}") for n in "ab")
    boards[0].add(first)
    boards[1].add(second)
    for board in (*boards, other):
        board.refresh()
    assert [catalog.names() for catalog in catalogs] == [["team/a", "team/b"]] * 2 + [[]]
    assert catalogs[0].find("team/b") == second
    boards[1].remove("team/a")
    boards[0].refresh()
    assert catalogs[0].names() == ["team/b"]
    assert catalogs[0].find("team/a") is None
