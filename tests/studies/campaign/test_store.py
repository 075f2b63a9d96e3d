"""The store: what is written is read, equal variants count once, and other files are refused."""

import sqlite3

import pytest

from shadowrun.errors import DataFileError
from shadowrun.studies.campaign.combine_stores import combine
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import CampaignInfo, Event, FindingRow, ResultRow, VariantRow

INFO = CampaignInfo("c0ffee", ("sim", "npu"), "cpu", ("bitwise",), versions={"torch": "2.13.0"})
WRONG = FindingRow("aten::exp", "f32", "mismatch", "implementation", "words", "1 element of 8", "forward")


def variant(number, identity=None, **more):
    return VariantRow(number, "0a1b2c3d4e5f", number + 100 if identity is None else identity, **more)


def filled(path):
    store = CampaignStore.begin(path, INFO)
    with store.written():
        store.add_variant(variant(0, mutators=("insert", "shape", "insert")))
        store.add_result(ResultRow(0, 0, "ok", "", 0, 7, 1500, {"aten::exp": "ok", "aten::mm": "unsupported"}))
        store.add_result(ResultRow(0, 1, "finding", "", 3, 7, 1500, {"aten::exp": "ok"}, [WRONG, WRONG]), '["r"]')
        store.add_variant(variant(1, invalid="the reference raises"))
        store.add_variant(VariantRow(2, None, None, invalid="crash while it was made: signal 11"))
        store.add_event(Event(2, -1, 1, "crash", "signal 11 (SIGSEGV)", ""))
        store.set_session(store.add_session("2026-01-01T00:00:00+00:00", 2), 3, 1.5, 2.5)
    return store


def test_what_is_written_is_read(tmp_path):
    filled(tmp_path / "x").close()
    read = CampaignStore.open(tmp_path / "x")
    assert read.info == INFO
    first, second, third = read.variants()
    assert first == variant(0, mutators=("insert", "shape", "insert"), recipe='["r"]')
    assert (second.invalid, third.program, third.identity) == ("the reference raises", None, None)
    good, bad = read.results()
    assert good == ResultRow(0, 0, "ok", "", 0, 7, 1500, {"aten::exp": "ok", "aten::mm": "unsupported"}, ())
    assert bad.findings == (WRONG, WRONG)
    assert list(read.events()) == [Event(2, -1, 1, "crash", "signal 11 (SIGSEGV)", "")]
    assert read.sessions() == [("2026-01-01T00:00:00+00:00", 2, 3, 1.5, 2.5)]
    assert dict(read.settled_targets()) == {0: 2, 1: 2, 2: 2}
    assert read.counts() == {
        "variants": 3, "duplicates": 0, "invalid": 2, "ok": 1, "finding": 1, "unsupported": 0, "unverified": 0,
        "failed": 0, "findings": 2, "distinct findings": 1, "processes lost": 1,
    }  # fmt: skip


def test_a_running_campaign_is_combined_as_of_one_moment(tmp_path, monkeypatch):
    """Its rows come in while they are copied: no result may come without its variant."""
    running = filled(tmp_path / "x")
    running._connection.execute("pragma busy_timeout = 0")
    refused = []
    read = CampaignStore.results

    def results(store):
        try:
            with running.written():
                running.add_variant(variant(9))
                running.add_result(ResultRow(9, 0, "ok"))
        except DataFileError as error:  # it would wait, and this thread cannot go on meanwhile
            refused.append(error)
        return read(store)

    monkeypatch.setattr(CampaignStore, "results", results)
    combine(tmp_path / "all", [tmp_path / "x"], INFO)
    monkeypatch.undo()
    assert len(refused) == 1
    made = CampaignStore.open(tmp_path / "all")  # raises if a result has no variant
    assert {r.number for r in made.results()} == {0}


def test_what_the_reference_shows_against_itself_keeps_its_role(tmp_path):
    own = WRONG._replace(role="reference")
    store = filled(tmp_path / "x")
    with store.written():
        store.add_variant(variant(7))
        store.add_result(ResultRow(7, 0, "finding", findings=(WRONG, own)))
        store.add_result(ResultRow(7, 1, "finding", findings=(WRONG,)))
    store.close()
    *_, first, second = CampaignStore.open(tmp_path / "x").results()
    assert (first.findings, second.findings) == ((WRONG, own), (WRONG,))


def test_a_second_result_of_a_case_is_left_out(tmp_path):
    store = filled(tmp_path / "x")
    with store.written():
        store.add_variant(variant(0, identity=5))
        assert not store.add_result(ResultRow(0, 0, "finding", findings=[WRONG]))
    assert [r.status for r in store.results()] == ["ok", "finding"]
    assert next(iter(store.variants())).identity == 100


def test_of_equal_variants_the_lowest_number_counts(tmp_path):
    store = CampaignStore.begin(tmp_path / "x", INFO)
    with store.written():
        for number in (5, 3, 8):
            store.add_variant(variant(number, identity=-9, recipe="[]"))
            store.add_result(ResultRow(number, 0, "finding", findings=[WRONG]))
        store.add_variant(variant(9, identity=-9, duplicate_of=5))
        store.add_variant(variant(4))
        store.add_variant(variant(6, identity=77, duplicate_of=2))  # number 2 is still to come
        store.keep_first_of_equals()
    assert [(v.number, v.duplicate_of) for v in store.variants()] == [(3, -1), (4, -1), (5, 3), (6, 2), (8, 3), (9, 3)]
    assert [r.number for r in store.results()] == [3]
    assert store.counts()["findings"] == 1


def test_a_variant_that_passes_takes_few_bytes(tmp_path):
    path = tmp_path / "x"
    store = CampaignStore.begin(path, INFO)
    ops = {f"aten::op{k}": "ok" for k in range(300)}
    names = list(ops)
    with store.written():
        for number in range(5000):
            used = {names[(number + 7 * k) % 300]: "ok" for k in range(12)}
            store.add_variant(
                variant(number, identity=number * 0x9E3779B97F4A7C15 % 2**63, mutators=("insert", "shape"))
            )
            store.add_result(ResultRow(number, 0, "ok", "", 0, 12, 70_000 + number, used))
    store.close()
    assert path.stat().st_size / 5000 < 150


def test_other_stores_are_refused(tmp_path):
    filled(tmp_path / "x").close()
    with pytest.raises(DataFileError, match="another campaign") as caught:
        CampaignStore.begin(tmp_path / "x", CampaignInfo("other", ("sim",), "cpu"))
    assert caught.value.slug == "campaign-other"
    first = CampaignStore.begin(tmp_path / "x", INFO)
    with pytest.raises(DataFileError, match="another process"):
        CampaignStore.begin(tmp_path / "x", INFO)
    first.close()
    (tmp_path / "text").write_text("mine")
    for use in (CampaignStore.open, lambda p: CampaignStore.begin(p, INFO)):
        with pytest.raises(DataFileError, match="was not changed"):
            use(tmp_path / "text")


@pytest.mark.parametrize(
    "harm",
    [
        "update result set status = 'fine'",
        "update result set target = 7 where target = 1",
        "update variant set mutators = x'ffff'",
        "update variant set mutators = x'01'",
        "update variant set duplicate_of = 4",
        "update result set ops = x'ffff'",
        "update outcome set kind = 'nonsense'",
        "update meta set value = '[]'",
        "update finding set outcome_id = 99",
        "create table more (x)",
        "create trigger t after insert on name begin delete from name; end",
        "update session set wall_s = 'x'",
    ],
)
def test_a_store_that_was_tampered_with_is_refused(tmp_path, harm):
    path = tmp_path / "x"
    filled(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(harm)
    with pytest.raises(DataFileError) as caught:
        CampaignStore.open(path)
    assert caught.value.slug == "data-file-corrupt"


def test_a_full_disk_is_told_and_what_was_written_stays(tmp_path):
    store = filled(tmp_path / "x")
    store._connection.execute("pragma max_page_count = 1")
    with pytest.raises(DataFileError, match="cannot be written any more"), store.written():
        for number in range(10, 10_000):
            store.add_variant(variant(number))
    store.close()
    assert CampaignStore.open(tmp_path / "x").counts()["variants"] == 3


def test_names_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("shadowrun.studies.campaign.store._MAX_NAMES", 5)
    store = CampaignStore.begin(tmp_path / "x", INFO)
    with store.written():
        for number in range(20):
            store.add_variant(variant(number, invalid=f"index {number}"))
    assert len({v.invalid for v in store.variants()}) == 5
