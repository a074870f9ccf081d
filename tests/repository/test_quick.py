"""Tests that the table of the tests of `make test` names existing tests."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.quick import TESTS, quick_tests


def test_quick_table_names_existing_tests() -> None:
    for name in quick_tests():
        file, _, case = name.partition("::")
        assert (TESTS / file).exists(), name
        if case:
            functions = {each.name for each in ast.parse((TESTS / file).read_text()).body if hasattr(each, "name")}
            assert case.partition("[")[0] in functions, name


def test_each_room_has_quick_tests() -> None:
    without = {"cli", "ecosystem", "faults", "strangers"}  # programs in processes of their own, or rare events
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders - {name.partition("/")[0] for name in quick_tests()} == without


def test_named_cases_exist(request: pytest.FixtureRequest) -> None:
    """The test sees the collected tests: by `make test`, all files of the table."""
    config = request.config
    if config.option.keyword or any("::" in argument for argument in config.args):
        pytest.skip("needs all tests of each file")
    ids = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    files = {each.partition("::")[0] for each in ids}
    cases = {name for name in quick_tests() if name.endswith("]")}
    assert {name for name in cases if name.partition("::")[0] in files and name not in ids} == set()
