"""One `RunInfo` for the runs of a combined file, with a note on all in which they are not alike."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError
from shadowrun.store.codec import jsonable
from shadowrun.store.sources import are_ranks, name_runs, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.store.sources import SourceRun
    from shadowrun.types import RunInfo

__all__ = ["check_platforms", "merge_infos"]

MAX_VALUES = 4


def check_platforms(files: Sequence[tuple[str, RunInfo]]) -> None:
    """Refuse to put runs of different platforms together: no finding would be of one target any more.

    Ranks may sit on devices of different numbers. Versions, fingerprints and options may differ, which is noted.

    Raises:
        DataFileError: Names two files and their platforms.
    """
    name, first = files[0]
    for other, info in files[1:]:
        if _platforms(info) != _platforms(first):
            raise DataFileError(
                f"{name!r} compares {first.target} with {first.ref}, and {other!r} {info.target} with {info.ref}: "
                "only runs of the same platforms can be combined. Make a file of its own for each pair of platforms.",
                slug="combine-platforms",
            )


def merge_infos(sources: Sequence[SourceRun]) -> RunInfo:
    """What the runs were together.

    Ranks ran at the same time: their wall time is that of the slowest. Other runs count one after the other.
    """
    infos = [source.info for source in sources]
    first = infos[0]
    if are_ranks(sources):
        slowest = max(infos, key=lambda i: i.wall_s)
        wall_s, own_s, behind_s = slowest.wall_s, slowest.own_s, slowest.behind_s
    else:
        wall_s, own_s, behind_s = (sum(times) for times in zip(*map(_times, infos), strict=True))
    return dataclasses.replace(
        first,
        target=_common(infos, lambda i: i.target),
        ref=_common(infos, lambda i: i.ref),
        target_fingerprint=_same(infos, lambda i: i.target_fingerprint),
        ref_fingerprint=_same(infos, lambda i: i.ref_fingerprint),
        versions=_same(infos, lambda i: i.versions),
        rank=min(i.rank for i in infos),
        world_size=max(i.world_size for i in infos),
        started=min(i.started for i in infos),
        wall_s=wall_s,
        own_s=own_s,
        behind_s=behind_s,
        complete=all(i.complete for i in infos),
        notes=tuple(_notes(sources)),
        raised=next((i.raised for i in infos if i.raised), ""),
        unselected=first.unselected if all(i.unselected for i in infos) else "",
    )


def _times(info: RunInfo) -> tuple[float, float, float]:
    return info.wall_s, info.own_s, info.behind_s


def _platforms(info: RunInfo) -> tuple[str, str]:
    return _without_index(info.target), _without_index(info.ref)


def _without_index(platform: str) -> str:
    """``cuda`` for ``cuda:3``."""
    return re.sub(r":\d+$", "", platform)


def _common(infos: Sequence[RunInfo], platform: Callable[[RunInfo], str]) -> str:
    names = {platform(info) for info in infos}
    return names.pop() if len(names) == 1 else _without_index(min(names))


def _same(infos: Sequence[RunInfo], facts: Callable[[RunInfo], dict[str, Any]]) -> dict[str, Any]:
    """The facts that hold for all runs; the others are in the notes, and in full with each source."""
    first, *rest = (facts(info) for info in infos)
    return {key: value for key, value in first.items() if all(key in other and other[key] == value for other in rest)}


def _notes(sources: Sequence[SourceRun]) -> Iterator[str]:
    worlds = {source.info.world_size for source in sources}
    if are_ranks(sources):
        missing = set(range(max(worlds))) - {source.info.rank for source in sources}
        if missing:
            which = "rank" if len(missing) == 1 else "ranks"
            yield f"The files of {which} {ranges(missing)} of {max(worlds)} are not among those that were combined."
    elif max(worlds) > 1:
        yield "These files are not each a rank of one run: the runs in it are named by their files."
    incomplete = [source.number for source in sources if not source.info.complete]
    if incomplete and len(incomplete) < len(sources):
        yield f"Had not ended, or was killed: {name_runs(sources, incomplete)}."
    for what, facts in (
        ("target", lambda i: _facts(i.target_fingerprint)),
        ("reference", lambda i: _facts(i.ref_fingerprint)),
        ("versions", lambda i: i.versions),
        ("options", lambda i: {k: v for k, v in i.config.items() if k not in ("file", "append")}),
        ("program", lambda i: {"command line": " ".join(i.argv)}),
    ):
        yield from _differences(what, [facts(source.info) for source in sources], sources)
    texts = Counter(note for source in sources for note in dict.fromkeys(source.info.notes))
    for text, n in texts.items():
        having = [source.number for source in sources if text in source.info.notes]
        yield text if n == len(sources) else f"{name_runs(sources, having).removesuffix(' only')}: {text}"


def _facts(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """All but the number of the device, which ranks differ in by nature."""
    return {k: _without_index(v) if isinstance(v, str) else v for k, v in fingerprint.items()}


def _differences(what: str, facts: Sequence[dict[str, Any]], sources: Sequence[SourceRun]) -> Iterator[str]:
    for key in dict.fromkeys(key for one in facts for key in one):
        values: dict[str, list[int]] = {}
        for source, one in zip(sources, facts, strict=True):
            values.setdefault(_printed(one.get(key)), []).append(source.number)
        if len(values) > 1:
            told = [f"{value} ({name_runs(sources, numbers)})" for value, numbers in list(values.items())[:MAX_VALUES]]
            more = f"; {len(values) - MAX_VALUES} more" if len(values) > MAX_VALUES else ""
            yield f"The runs differ in {what}, {key}: {'; '.join(told)}{more}."


def _printed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(jsonable(value), sort_keys=True)
