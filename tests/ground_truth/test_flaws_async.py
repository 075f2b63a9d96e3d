"""The same flaws on a device that runs behind its host: found and placed as where each call is waited for."""

import pytest

from shadowrun.replay.paths import snapshots
from shadowrun.sim import CATALOGUE
from tests.ground_truth.test_flaws import check_found


@pytest.fixture(autouse=True)
def behind(clean_sim, monkeypatch):
    monkeypatch.setattr(snapshots, "_SHARED_FROM_BYTES", 0)
    with clean_sim.asynchronous():
        yield


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:The operator:UserWarning")
def test_the_flaw_is_found_where_it_is(clean_sim, name, capfd):
    check_found(clean_sim, name)
