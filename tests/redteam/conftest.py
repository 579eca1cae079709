"""One coordinator that all attacks on it meet, one after another, as it would in a run."""

from collections.abc import Iterator

import pytest

from tests.redteam.hostile import Target, coordinator


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with coordinator(tmp_path_factory.mktemp("target")) as found:
        yield found
