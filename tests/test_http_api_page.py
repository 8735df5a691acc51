"""docs/http-api.md names everything that it is a reference of."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.api.health import HEALTH_ROUTES
from meshd.config.workers import WorkerSpec
from meshd.errors import CODES

_PAGE = (Path(__file__).parents[1] / "docs" / "http-api.md").read_text()


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_every_code_is_in_a_row_of_its_status(code) -> None:
    rows = [line for line in _PAGE.splitlines() if f"`{code.name}`" in line and str(code.status) in line]
    assert rows, f"add {code.status} {code.name} to docs/http-api.md"


@pytest.mark.parametrize("path", [each.path for each in ENDPOINTS] + list(HEALTH_ROUTES))
def test_every_path_is_named(path: str) -> None:
    assert path in _PAGE


@pytest.mark.parametrize("member", [each.name for each in fields(WorkerSpec)])
def test_every_member_of_a_worker_is_named(member: str) -> None:
    assert f"`{member}`" in _PAGE
