"""One store of many: rows of each variant once, and of equal variants the lowest number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.errors import DataFileError
from shadowrun.studies.campaign.store import CampaignStore, other_campaign

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shadowrun.studies.campaign.tables import CampaignInfo

__all__ = ["add_rows", "combine"]


def combine(out: Path, shards: Iterable[Path], info: CampaignInfo) -> None:
    """Make one store of shards, whole or not at all; the result does not depend on their order or number.

    Args:
        out: The store; replaced if it is one.
        shards: Stores of the same campaign.
        info: Of this campaign.

    Raises:
        DataFileError: A shard cannot be read or is of another campaign, or the store cannot be written.
    """
    # A new file, renamed at the end: a reader of the old one keeps it whole.
    new = out.with_name(f"{out.name}.part")
    try:
        new.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(new, error) from error
    store = CampaignStore.begin(new, info)
    try:
        # In order of their names, so that ids of names are the same whatever order they were given in.
        for path in sorted(shards):
            add_rows(store, path)
        with store.written():
            store.keep_first_of_equals()
    except BaseException:
        store.close()
        new.unlink(missing_ok=True)
        raise
    store.close()
    try:
        new.replace(out)
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(path: Path, error: OSError) -> DataFileError:
    return DataFileError(
        f"The store of a campaign {str(path)!r} cannot be written: {error.strerror}. Choose a folder that you may "
        "write to.",
        slug="campaign-store",
    )


def add_rows(store: CampaignStore, path: Path) -> int:
    """Add the rows of another store that are not there yet; gives the number of findings among them.

    Raises:
        DataFileError: It cannot be read or is of another campaign, or the store cannot be written.
    """
    other = CampaignStore.open(path)
    try:
        # The hash is what a file says of itself; the targets are counted.
        if (other.info.campaign, len(other.info.targets)) != (store.info.campaign, len(store.info.targets)):
            raise other_campaign(path)
        n_findings = 0
        # A running campaign writes on: results of variants that were not there a moment ago must not come in.
        with other.snapshot(), store.written():
            for variant in other.variants():
                # Variants first: results and findings refer to them.
                store.add_variant(variant)
            for result in other.results():
                if store.add_result(result):
                    n_findings += len(result.findings)
            for event in other.events():
                store.add_event(event)
            for started, jobs, n_variants, wall_s, cpu_s in other.sessions():
                store.set_session(store.add_session(started, jobs), n_variants, wall_s, cpu_s)
    finally:
        other.close()
    return n_findings
