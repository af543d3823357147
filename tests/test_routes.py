"""The routes through the package enter no more files and functions than ARCHITECTURE says."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "routes.py"))
WRITTEN = SCRIPT["written"]()


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    return SCRIPT["routes"](tmp_path_factory.mktemp("routes"))


def test_the_table_has_every_route(routes):
    assert WRITTEN.keys() == routes.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_route_enters_no_more_than_before(routes, name):
    found = SCRIPT["entered"](routes[name])
    assert all(now <= before for now, before in zip(found.counts(), WRITTEN[name], strict=True))
