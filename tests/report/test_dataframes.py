"""Results as rows: printed, in a notebook, as data frames, and in files."""

import csv
import math

import pandas as pd
import pytest
import torch
from pyarrow import parquet

import shadowrun
from shadowrun import Status, sim
from shadowrun.report.dataframes import Rows
from shadowrun.run import Run


@pytest.fixture(scope="module")
def run():
    sim.enable("sim")
    torch.manual_seed(0)
    with sim.flaws("missing-cumsum", "matmul-in-bf16"), shadowrun.compare("sim") as made:
        for _ in range(2):
            x = torch.linspace(-9, 9, 64).reshape(8, 8)
            (x @ x).cumsum(0).exp()
            made.step()
    return made


@pytest.fixture(scope="module")
def wrong(run):
    return next(finding for finding in run.findings() if finding.kind == "mismatch")


def test_a_finding_is_one_line_and_printed_it_says_what_to_do(run, wrong):
    assert "\n" not in repr(wrong)
    assert repr(wrong).startswith(f"<Finding {wrong.number}: mismatch of aten::mm (")
    assert "2 of 2 calls, " in repr(wrong)
    assert "test_dataframes.py" in repr(wrong)
    text = str(wrong)
    assert wrong.next_step in text
    assert wrong.evidence in text
    assert len(text.splitlines()) == 5
    printed = repr(run.findings())
    assert len(printed.splitlines()) == len(run.findings()) + 2


def test_a_list_of_many_is_cut():
    assert repr(Rows(range(50))).splitlines()[-2] == " … 30 more"
    assert repr(Rows([])) == "[]"


def test_a_run_says_what_it_compared_and_how_it_ended(run, tmp_path):
    path = tmp_path / "a.shadowrun"
    with shadowrun.compare("cpu[threads=1]", file=path):
        torch.ones(2) + 1
    assert repr(shadowrun.load(path)).startswith("<shadowrun.Run cpu[threads=1] against cpu: PASSED: ")
    assert "sim against cpu, stopped" in repr(run)


def test_raise_for_findings_names_operator_line_and_cause(run, wrong):
    with pytest.raises(AssertionError, match="FAILED: 1 unsupported, 1 mismatch") as error:
        run.raise_for_findings()
    assert isinstance(error.value, shadowrun.FindingsError)
    for text in ("aten::mm", "aten::cumsum", "test_dataframes.py", str(wrong.cause)):
        assert text in str(error.value)
    assert {finding.kind for finding in error.value.findings} == {"unsupported", "mismatch"}
    run.raise_for_findings(fail_on=("slow",))


def test_a_notebook_gets_tables(run):
    html = run.findings()._repr_html_()
    assert "aten::mm" in html
    assert "<table" in html
    assert "aten::exp" in run.summary()._repr_html_()
    assert Rows([1])._repr_html_() is None


def test_findings_and_operators_become_data_frames(run, wrong):
    frame = run.findings().to_dataframe()
    assert list(frame["op"]) == [finding.op for finding in run.findings()]
    assert frame[frame["op"] == "aten::mm"]["worst_max_abs"].item() == wrong.worst.max_abs
    operators = run.summary().to_dataframe().set_index("op")
    assert operators.loc["aten::mm", "n_mismatch"] == 2
    assert isinstance(operators.loc["aten::mm", "dtypes"], str)


def test_records_become_a_data_frame_with_the_worst_difference(run):
    frame = run.to_dataframe()
    assert len(frame) == sum(1 for _ in run.records())
    product = frame[frame["op"] == "aten::mm"]
    worst = next(run.records(op="aten::mm")).diffs[0]
    assert list(product["step"]) == [0, 1]
    assert product["max_abs"].iloc[0] == worst.max_abs
    assert set(product["status"]) == {"mismatch"}
    equal = frame[frame["op"] == "aten::linspace"]
    assert equal["max_abs"].isna().all()
    assert len(run.to_dataframe(status=Status.UNSUPPORTED)) == 2


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_records_in_a_file_are_those_of_the_run(run, tmp_path, ending):
    path = tmp_path / f"calls.{ending}"
    n = run.write_records(path)
    read = pd.read_csv(path) if ending == "csv" else parquet.read_table(path).to_pandas()
    expected = run.to_dataframe()
    assert n == len(read) == len(expected)
    assert list(read.columns) == list(expected.columns)
    assert list(read["op"]) == list(expected["op"])
    both = zip(read["max_abs"], expected["max_abs"], strict=True)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in both)


def test_parquet_keeps_its_types_where_the_first_part_is_empty(run, tmp_path, monkeypatch):
    monkeypatch.setattr("shadowrun.report.dataframes._BATCH", 1)
    run.write_records(tmp_path / "calls.parquet")
    types = {field.name: str(field.type) for field in parquet.read_schema(tmp_path / "calls.parquet")}
    assert (types["n_elements"], types["max_abs"], types["op"]) == ("int64", "double", "string")


def test_a_cell_of_a_record_is_no_formula(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x):
            return x + 1

    Net.__name__ = Net.__qualname__ = "=HYPERLINK(1)"
    with shadowrun.compare("cpu[threads=1]") as run:
        Net()(torch.ones(1))
    run.write_records(tmp_path / "calls.csv")
    with (tmp_path / "calls.csv").open() as file:
        assert any(row["module"] == "'=HYPERLINK(1)" for row in csv.DictReader(file))


def test_wrong_files_are_refused(run, tmp_path):
    with pytest.raises(shadowrun.UsageError, match=r"\.csv or \.parquet"):
        run.write_records(tmp_path / "calls.xlsx")
    with pytest.raises(shadowrun.UsageError, match="cannot be written"):
        run.write_records(tmp_path / "none" / "calls.csv")


def test_coverage_is_a_table_in_a_notebook(sample):
    run = Run(sample.build())
    html = run.coverage()._repr_html_()
    assert "operators" in html
    assert html.count("<tr") == 1 + run.coverage().n_operators
    assert "unsupported" in html
