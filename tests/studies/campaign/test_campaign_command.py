"""The command: a small campaign from end to end, and what it says of wrong use."""

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from shadowrun.cli.main import main
from shadowrun.errors import DataFileError, UsageError
from shadowrun.studies.campaign.campaign_folder import CampaignFolder
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.shards import Shard, shard_of
from shadowrun.studies.zoo.program import program_of, write_zoo
from tests.studies.campaign.programs import CONV, MLP

pytestmark = pytest.mark.usefixtures("forked_processes", "clean_sim")
OPTIONS = ("--target", "sim", "--flaws", "gelu-by-tanh", "--zoo", "z", "--jobs", "1")


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "CI_NODE_INDEX", "CIRCLE_NODE_INDEX"):
        monkeypatch.delenv(name, raising=False)
    write_zoo(tmp_path / "z", [program_of("mlp", "tests", MLP), program_of("conv", "tests", CONV)], ())
    return tmp_path


def refused(capsys, *argv):
    try:
        status = main(["campaign", *argv])
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_from_end_to_end(zoo, capsys):
    assert main(["campaign", "run", "c", *OPTIONS, "--n", "40", "-o", "s.json"]) == 0
    assert "40 of 40 (100.0 %)" in capsys.readouterr().out
    counts = json.loads((zoo / "s.json").read_text())["counts"]
    assert counts["variants"] == 40
    assert counts["finding"] > 0
    assert counts["failed"] == 0
    store = CampaignStore.open(zoo / "c" / "campaign.shadowcampaign")
    blamed = {f.op for r in store.results() for f in r.findings if f.kind == "mismatch"}
    assert "aten::gelu" in blamed
    assert store.info.targets == ("sim (gelu-by-tanh)",)
    assert main(["campaign", "status", "c"]) == 0
    assert "40 of 40" in capsys.readouterr().out
    assert main(["campaign", "combine", "c"]) == 0
    assert "1 shards, 40 variants" in capsys.readouterr().out
    for other in (("--seed", "1"), ("--mutators", "remove"), ("--programs", "mlp"), ("--ref", "cpu[threads=1]")):
        assert "campaign-other" in refused(capsys, "run", "c", *OPTIONS, "--n", "40", *other)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "c"], "missing-target"),
        (["run", "c", "--target", "nowhere"], "unknown-device"),
        (["run", "c", "--target", "sim", "--mutators", "insertt"], "unknown-mutator"),
        (["run", "c", "--target", "sim", "--flaws", "no-such-flaw"], "no-such-flaw"),
        (["run", "c", "--target", "cpu", "--flaws", "matmul-in-bf16"], "bad-simulation"),
        (["run", "c", "--target", "sim", "--zoo", "none"], "zoo-missing"),
        (["run", "c", "--target", "sim", "--zoo", "text"], "zoo-file"),
        (["run", "c", "--target", "sim", "--zoo", "z", "--programs", "bert*"], "no-programs"),
        (["run", "text", "--target", "sim", "--zoo", "z"], "campaign-folder"),
        (["run", ".", "--target", "sim", "--zoo", "z"], "campaign-folder"),
        (["run", "c", "--target", "sim", "--target", "sim"], "names a platform twice"),
        (["run", "c", "--target", "sim", "--shard", "4/3"], "outside of 3 shards"),
        (["run", "c", "--target", "sim", "--shard", "three"], "use I/N"),
        (["run", "c", "--target", "sim", "--shard", "/3"], "none of SLURM_ARRAY_TASK_ID"),
        (["run", "c", "--target", "sim", "--n", "0"], "--n"),
        (["run", "c", "--target", "sim", "--minutes", "nan"], "--minutes"),
        (["run", "c", "--target", "sim", "-o", "no/folder.json"], "unwritable-report"),
        (["status", "none"], "campaign-folder"),
        (["resume", "none"], "campaign-folder"),
        (["combine", "none"], "campaign-folder"),
        ([], "ACTION"),
    ],
)
def test_wrong_use(zoo, capsys, argv, words):
    (zoo / "text").write_text("a text of mine")
    assert words in refused(capsys, *argv)
    assert not (zoo / "c").exists()
    assert (zoo / "text").read_text() == "a text of mine"


def tampered(path, **changes):
    file = path / "campaign.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def made(zoo, **changes):
    from shadowrun.studies.campaign.campaign_folder import CampaignSettings

    folder = CampaignFolder.create(zoo / "c", CampaignSettings(("cpu",), n=5), zoo / "z")
    tampered(folder.path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "in format 2"),
        ({"targets": ["cpu[env:LD_PRELOAD=/tmp/x.so]"]}, "platform-refused"),
        ({"ref": "cpu[python=/tmp/python]"}, "platform-refused"),
        ({"targets": []}, "data-file-corrupt"),
        ({"targets": "cpu"}, "data-file-corrupt"),
        ({"n": -1}, "data-file-corrupt"),
        ({"timeout_s": "nan"}, "data-file-corrupt"),
        ({"programs": "0" * 32}, "campaign-other"),
    ],
)
def test_a_folder_from_somebody_else(zoo, capsys, changes, words):
    made(zoo, **changes)
    assert words in refused(capsys, "resume", "c")


def test_settings_that_are_no_json(zoo, capsys):
    made(zoo)
    for text in ("{", "[" * 100_000, "[]", "x" * (1 << 21)):
        (zoo / "c" / "campaign.json").write_text(text)
        assert "data-file-corrupt" in refused(capsys, "status", "c")


def test_a_shard_of_another_campaign(zoo, capsys):
    made(zoo)
    other = CampaignFolder.create(
        zoo / "d", CampaignFolder.open(zoo / "c").settings.__class__(("cpu",), n=5, seed=3), zoo / "z"
    )
    CampaignStore.begin(other.shard(Shard()), other.info()).close()
    assert "campaign-other" in refused(capsys, "combine", "c", "d/shards/1-of-1.shadowcampaign")
    assert not (zoo / "c" / "campaign.shadowcampaign").exists()


def newer(path):
    with sqlite3.connect(path) as connection:
        connection.execute("pragma user_version = 99")


def cut(path):
    path.write_bytes(path.read_bytes()[:6000])


@pytest.mark.parametrize(
    ("harm", "slug"),
    [
        (newer, "campaign-store"),
        (cut, "data-file-corrupt"),
        (lambda path: path.write_text("mine"), "campaign-store"),
    ],
)
def test_a_store_that_is_none_of_this_version(zoo, capsys, harm, slug):
    made(zoo)
    folder = CampaignFolder.open(zoo / "c")
    CampaignStore.begin(folder.shard(Shard()), folder.info()).close()
    harm(folder.shard(Shard()))
    content = folder.shard(Shard()).read_bytes()
    for action in ("status", "report", "combine", "resume", "repro"):
        error = refused(capsys, action, "c")
        assert slug in error, (action, error)
        assert "1-of-1" in error
    assert refused(capsys, "reproduce", "c", "0")
    assert folder.shard(Shard()).read_bytes() == content
    assert not folder.combined.exists()


def test_another_torch_makes_other_variants(zoo, capsys):
    made(zoo, torch="1.0.0")
    for action in (["resume", "c"], ["repro", "c"], ["reproduce", "c", "0"]):
        error = refused(capsys, *action)
        assert "campaign-other" in error
        assert "a campaign with torch '1.0.0'" in error


def test_two_processes_on_one_store(zoo, capsys):
    made(zoo)
    folder = CampaignFolder.open(zoo / "c")
    store = CampaignStore.begin(folder.shard(Shard()), folder.info())
    error = refused(capsys, "resume", "c")
    assert "another process" in error
    assert "--shard" in error
    store.close()


def test_what_the_folder_is_not_is_said_by_each_action(zoo, capsys):
    (zoo / "text").write_text("mine")
    for action in (["report"], ["repro"], ["add-known"], ["status"], ["combine"]):
        for name in ("none", "text"):
            assert "campaign-folder" in refused(capsys, *action, name)
    assert "campaign-folder" in refused(capsys, "reproduce", "none", "1")
    made(zoo)
    assert "campaign-folder" in refused(capsys, "report", "c", "--before", "none")
    assert "bad-option" in refused(capsys, "report", "c", "--fail-on", "mismatches")
    assert "unknown-finding" in refused(capsys, "report", "c", "--cause", "1")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_was_ended_goes_on_with_resume(zoo, capsys, number):
    """Real variants: the same results as of a campaign that was not interrupted."""
    assert main(["campaign", "run", "whole", *OPTIONS, "--n", "100"]) == 0
    command = [sys.executable, "-m", "shadowrun", "campaign", "run", "c", *OPTIONS, "--n", "100"]
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while n_settled(zoo / "c") < 10:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert ("resume c` goes on" in error) == (number == signal.SIGINT)
    first = n_settled(zoo / "c")
    assert 10 <= first < 100
    assert main(["campaign", "resume", "c", "--jobs", "2"]) == 0
    assert outcomes(zoo / "c") == outcomes(zoo / "whole")


def n_settled(path):
    with contextlib.suppress(DataFileError):
        return sum(
            1 for shard in CampaignFolder.open(path).shards() for _ in CampaignStore.open(shard).settled_targets()
        )
    return 0


def outcomes(path):
    store = CampaignStore.open(path / "campaign.shadowcampaign")
    return list(store.variants()), [r._replace(cpu_us=0) for r in store.results()]


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {}, Shard()),
        ("3/8", {"CI_NODE_INDEX": "1", "CI_NODE_TOTAL": "4"}, Shard(2, 8)),
        (None, {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}, Shard(2, 4)),
        (None, {"JOB_COMPLETION_INDEX": "3"}, Shard()),
        ("/8", {"JOB_COMPLETION_INDEX": "3"}, Shard(3, 8)),
        (None, {"CI_NODE_INDEX": "4", "CI_NODE_TOTAL": "4"}, Shard(3, 4)),
        (None, {"CIRCLE_NODE_INDEX": "0", "CIRCLE_NODE_TOTAL": "4"}, Shard(0, 4)),
    ],
)
def test_shards_of_the_environment(text, environment, expected):
    assert shard_of(text, environment)[0] == expected


@pytest.mark.parametrize(
    "environment", [{"CI_NODE_INDEX": "x", "CI_NODE_TOTAL": "4"}, {"CI_NODE_INDEX": "9", "CI_NODE_TOTAL": "4"}]
)
def test_shards_that_are_none(environment):
    with pytest.raises(UsageError):
        shard_of(None, environment)
