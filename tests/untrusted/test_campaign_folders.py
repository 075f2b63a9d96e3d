"""A zoo, a trace and the folder of a campaign may come from anyone: graphs, links, pipes, sizes, names."""

from __future__ import annotations

import argparse
import errno
import json
import lzma
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from shadowrun import limits
from shadowrun.cli import main as cli
from shadowrun.cli.main import build_parser, main
from shadowrun.cli.studies import campaign_findings
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.errors import DataFileError, UsageError
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_arguments, depends_on_values
from shadowrun.limits import ResourceLimits, at_most_free
from shadowrun.settings import fits_platform
from shadowrun.store import captured_inputs
from shadowrun.store.atomic_write import atomic_write
from shadowrun.store.lock import FileLock
from shadowrun.studies.campaign import campaign_folder, engine, executors
from shadowrun.studies.campaign.campaign_folder import CHUNK, CampaignFolder, CampaignSettings
from shadowrun.studies.campaign.causes.cause_report import CauseFile, read_causes, write_cause
from shadowrun.studies.campaign.causes.known_causes import new_lines
from shadowrun.studies.campaign.causes.script_jobs import _Writer
from shadowrun.studies.campaign.combine_stores import add_rows, combine
from shadowrun.studies.campaign.engine import Engine, _n_of
from shadowrun.studies.campaign.seen_variants import SeenVariants
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import CampaignInfo, ResultRow, VariantRow
from shadowrun.studies.campaign.variants.program_draft import Library
from shadowrun.studies.campaign.variants.tracing import Invalid, Values, trace
from shadowrun.studies.shards import Shard
from shadowrun.studies.zoo import program as zoo_program
from shadowrun.studies.zoo.graph import Fill, Input, Runner, from_json
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.program import program_of, read_zoo, write_zoo
from shadowrun.studies.zoo.sources.foreign_graph import Rows, captured, plain
from shadowrun.studies.zoo.sources.graph_folders import collect_folders
from shadowrun.studies.zoo.sources.source import LeftOut
from shadowrun.types import Permissions

PRECIOUS = "precious\n"
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "elsewhere" / "bashrc"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


def data(inputs, calls):
    """A graph as a file has it: inputs as shape, dtype and fill; calls as operator and arguments."""
    described = [
        [f"x{k}", shape, dtype, fill or ["normal", 0.0, 1.0], [], 0, 0, "input"]
        for k, (shape, dtype, fill) in enumerate(inputs)
    ]
    return [described, [[op, args, {}, ""] for op, *args in calls], [[len(calls) - 1, 0]]]


def x(k):
    return {"ref": [-1 - k, 0]}


def v(k):
    return {"ref": [k, 0]}


MM = data([([4, 4], "float32", None)], [("aten::relu", x(0)), ("aten::mm", v(0), x(0))])


def zoo_of(path, *graphs):
    write_zoo(Path(path), [program_of(f"p{k}", "modules", from_json(g)) for k, g in enumerate(graphs)], [])


def folder_of(path="c", **settings):
    zoo_of("programs", MM)
    return CampaignFolder.create(
        Path(path), CampaignSettings(**{"targets": ("cpu[threads=1]",), "n": 4} | settings), Path("programs")
    )


def changed(folder, **facts):
    file = folder.path / "campaign.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def run(*words):
    argv = [sys.executable, "-m", "shadowrun", *map(str, words)]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=100)


# -- graphs ----------------------------------------------------------------------------------------------


OUTSIDE = {
    "an index of a backward pass": data(
        [([8, 4], "float32", None), ([8], "int64", ["integers", 1e9, 1e9 + 9])],
        [("aten::embedding_dense_backward", x(0), x(1), 3, -1, False)],
    ),
    "a dimension": data([([4, 4], "complex64", None)], [("aten::_fft_c2c", x(0), [1000000], 0, True)]),
    "channels": data(
        [([2, 4000], "float32", None), ([1], "float32", None)],
        [("aten::native_batch_norm", x(0), x(1), x(1), None, None, True, 0.1, 1e-5)],
    ),
    "sparse": data(
        [([4, 4], "float32", None)],
        [("aten::to_sparse_csc", x(0)), ("aten::resize_", v(0), [400, 400]), ("aten::to_dense", v(1))],
    ),
    "the same place": data([([4], "float32", None)], [("aten::expand", x(0), [3, 4]), ("aten::fill_.Scalar", v(0), 1)]),
}


@pytest.mark.parametrize("graph", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.filterwarnings("ignore:Sparse CSC")
def test_a_graph_is_checked_at_each_call(graph):
    """When it is read, its tensors are not there yet: a kernel would have read or written elsewhere."""
    read = from_json(graph)
    with pytest.raises(Refused), torch.no_grad():
        Runner(read)(make_inputs(read.inputs))
    with pytest.raises(Invalid):
        trace(read, Values())


@pytest.mark.parametrize(
    "op",
    [
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_with_update.default,
    ],
)
def test_channels_of_each_batch_norm_are_checked(op):
    one, data_ = torch.ones(1), torch.ones(2, 4000)
    args = (data_, one, one, one, one, *((True,) if op is not aten._batch_norm_with_update.default else ()), 0.1, 1e-5)
    assert depends_on_values(op)
    with pytest.raises(Refused, match="channel"):
        check_arguments(op, args, {})
    with pytest.raises(Refused, match="channel"):
        check_arguments(aten.batch_norm_update_stats.default, (data_, one, one, 0.1), {})
    # Evaluation saves nothing.
    four = torch.ones(4)
    eval_args = (
        torch.ones(2, 4),
        torch.ones(2, 4),
        four,
        four,
        four,
        torch.ones(0),
        torch.ones(0),
        False,
        1e-5,
        [True] * 3,
    )
    check_arguments(aten.native_batch_norm_backward.default, eval_args, {})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({1: [1 << 28, 1 << 28, 256]}, "elements"),  # 2^64 of them, which wraps to 0
        ({2: "quint8"}, "no dtype"),
        ({2: "bits8"}, "no dtype"),
        ({2: "uint4"}, "no dtype"),
        ({3: ["integers", 0, 1e308]}, "integers"),
        ({3: ["integers", 0, float("nan")]}, "integers"),
        ({3: ["x" * 500, 0, 1]}, "unknown kind"),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(change, why):
    graph = json.loads(json.dumps(MM))
    for place, value in change.items():
        graph[0][0][place] = value
    with pytest.raises(ValueError, match=why):
        from_json(graph)


def test_an_empty_input_makes_no_large_triangle():
    graph = from_json(data([([0, 1 << 20, 1 << 20], "float32", ["triangle", 0, 1])], [("aten::relu", x(0))]))
    assert make_inputs(graph.inputs)[0].numel() == 0


FUNCTIONS = {
    "an operator": ("torch.ops.aten.embedding_dense_backward.default", [8, 4], [8], (3, -1, False)),
    "a function": ("torch.batch_norm_update_stats", [2, 4000], [1], ()),
}


@pytest.mark.parametrize(("name", "shape", "other", "more"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_graph_of_another_tool_is_checked_at_each_call(name, shape, other, more):
    """Also below a function, which is no operator by name."""
    integers = "embedding" in name
    rows = Rows()
    x_, y_ = rows.placeholder(), rows.placeholder()
    made = rows.call(name, [x_, y_, *map(plain, more)] if integers else [x_, y_, y_, plain(0.1)])
    rows.output({"tuple": [made if integers else rows.call("operator.getitem", [made, 0])]})
    fill = Fill("integers", 1e9, 1e9 + 9) if integers else Fill()
    second = Input("y", tuple(other), torch.int64 if integers else torch.float32, fill)
    with pytest.raises(Refused):
        captured(rows, [Input("x", tuple(shape)), second])


def test_sizes_of_another_tool_do_not_wrap():
    rows = Rows()
    rows.output({"tuple": [rows.placeholder()]})
    with pytest.raises(LeftOut, match="elements"):
        captured(rows, [Input("x", (1 << 26, 1 << 26, 1 << 12))])  # 2^64 of them
    with pytest.raises(LeftOut, match="elements"):
        captured(rows, [Input("x", (1,) * 100_000)])


def test_looking_at_a_call_is_no_call():
    """What a check computes must not be taken for a call of the program."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        check_arguments(aten.zeros.default, ([2, 2],), {"device": torch.device("cpu")})
        check_arguments(
            aten.embedding_dense_backward.default, (torch.ones(2, 2), torch.tensor([0, 1]), 3, -1, False), {}
        )
    assert {f.overloadpacket for f in seen} <= {aten.ones, aten.lift_fresh, aten.detach}


# -- zoos and traces ---------------------------------------------------------------------------------------


def raw_zoo(*rows):
    with lzma.open("z", "wb", preset=0) as file:
        for row in ({"format": "shadowrun zoo", "version": 1}, *rows):
            file.write(json.dumps(row).encode() + b"\n")
    return Path("z")


def test_a_count_without_end_is_an_error():
    key = from_json(MM).identity()[:12]
    with lzma.open("z", "wb", preset=0) as file:
        file.write(b'{"format": "shadowrun zoo", "version": 1}\n')
        file.write(f'["program","{key}","p","modules",[],Infinity,{json.dumps(MM)}]\n'.encode())
    with pytest.raises(DataFileError) as raised:
        _ = read_zoo(Path("z")).programs[key]
    assert raised.value.slug == "zoo-program"


def test_what_a_zoo_unpacks_to_is_bounded_by_its_size(monkeypatch):
    monkeypatch.setattr(zoo_program, "_LEAST_BYTES", 1 << 21)
    zoo = raw_zoo(*([["stage", "a", "b", 1, 1, [["x" * 9000, "y"]]]] * 300))
    assert zoo.stat().st_size < 10_000
    with pytest.raises(DataFileError, match="too large"):
        read_zoo(zoo)


def test_stages_that_are_parsed_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(zoo_program, "_MAX_STAGES", 1 << 16)
    with pytest.raises(DataFileError, match="too large"):
        read_zoo(raw_zoo(*([["stage", "a", "b", 1, 1, [["x" * 9000, "y"]]]] * 30)))


def test_a_zoo_is_not_written_through_a_link(victim):
    zoo_of(".shadowzoo", MM)
    Path(".shadowzoo.part").symlink_to(victim)
    assert main(["zoo", "add", "subgraphs"]) == 0
    assert victim.read_text() == PRECIOUS
    assert len(read_zoo(Path(".shadowzoo")).programs) >= 1


@needs_pipes
def test_a_trace_is_a_regular_file(capsys):
    os.mkfifo("pipe")
    assert main(["zoo", "add", "traces", "pipe"]) == 2
    assert "no regular file" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes")
def test_a_kernel_that_ends_the_process_has_a_message():
    ints = ([4], "int64", ["constant", -(2**63), 0]), ([4], "int64", ["constant", -1, 0])
    graph = data(ints, [("aten::div.Tensor_mode", x(0), x(1))])
    graph[1][0][2] = {"rounding_mode": "trunc"}
    zoo_of(".shadowzoo", graph)
    ended = run("zoo", "add", "subgraphs")
    if ended.returncode not in (0, 2):
        assert ended.returncode > 0, signal.Signals(-ended.returncode)
    assert "Traceback" not in ended.stderr


def graphnet(path, body, low=0, high=1):
    """A folder in GraphNet's layout, with two inputs of integers."""
    Path(path).mkdir()
    lines = ["class GraphModule:", "    def forward(self, x, y):", *(f"        {line}" for line in body)]
    Path(path, "model.py").write_text("\n".join(lines))
    facts = "    shape = [4]\n    dtype = 'torch.int64'"
    described = [f"class {n}:\n    name = '{n}'\n{facts}\n    data = [{v}]\n" for n, v in (("x", low), ("y", high))]
    Path(path, "input_meta.py").write_text("".join(described))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes")
def test_a_graph_of_somebody_else_costs_itself_only(capsys):
    graphnet("1", ["return (torch.div(x, y, rounding_mode='trunc'),)"], -(2**63), -1)  # the kernel ends the process
    graphnet("2", ["return (x + y,)"])
    assert main(["zoo", "add", "graphnet", "."]) == 0
    assert [p.name for p in read_zoo(Path(".shadowzoo")).programs.values()] == ["2"]
    assert main(["zoo", "list", "--left-out", "graphnet"]) == 0
    assert "crash: signal" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes")
def test_a_program_whose_subgraphs_are_looked_for_costs_itself_only(capsys):
    """It ran in the process of the command, which had to end with it, or to wait for it without end."""
    ints = ([4], "int64", ["constant", -(2**63), 0]), ([4], "int64", ["constant", -1, 0])
    ends = data(ints, [("aten::div.Tensor_mode", x(0), x(1))])
    ends[1][0][2] = {"rounding_mode": "trunc"}
    longer = data([([4, 4], "float32", None)], [("aten::relu", x(0)), ("aten::mm", v(0), x(0)), ("aten::sin", v(1))])
    zoo_of(".shadowzoo", ends, MM, longer)
    assert main(["zoo", "add", "subgraphs"]) == 0
    mined = [p.name for p in read_zoo(Path(".shadowzoo")).programs.values() if p.source == "subgraphs"]
    assert sorted(mined) == ["mm", "relu", "relu → mm"]
    assert main(["zoo", "list", "--left-out", "subgraphs"]) == 0
    assert "crash: signal" in capsys.readouterr().out


def test_lists_of_lists_are_counted():
    """Each holds the one before twice: 40 lines were a text of a million million entries."""
    graphnet("1", ["a = (x, y)", *["a = (a, a)"] * 40, "return (torch.stack(a),)"])
    found = collect_folders(Path("1"), lambda _: True, lambda *_: None)
    assert not found.programs
    ((_, why),) = found.stages[0].left_out
    assert "more than 1,000,000 arguments" in why


ACTIONS = [
    (["zoo", "list"], True, False),
    (["zoo", "show", "p"], True, False),
    (["zoo", "add", "traces", "f"], False, True),
    (["zoo", "add", "run", "f"], False, True),
    (["zoo", "add", "subgraphs"], False, True),
    (["zoo", "add", "modules"], False, False),
    (["campaign", "status", "c"], True, False),
    (["campaign", "report", "c"], True, False),
    (["campaign", "combine", "c"], True, False),
    (["campaign", "add-known", "c"], True, False),
    (["campaign", "repro", "c"], False, True),
    (["campaign", "reproduce", "c", "1"], False, True),
    (["campaign", "resume", "c"], False, False),  # in workers
]


@pytest.mark.parametrize(("argv", "reads", "runs"), ACTIONS, ids=[" ".join(a[0]) for a in ACTIONS])
def test_each_action_has_the_bounds_of_what_it_does(argv, reads, runs):
    args = build_parser().parse_args(argv)
    if hasattr(args, "reads_and_runs"):
        args.reads, args.runs_calls = args.reads_and_runs(args)
    assert (args.reads, args.runs_calls) == (reads, runs)
    assert not reads or args.no_limits is False


# -- folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["campaign.json", "programs.shadowzoo", "campaign.shadowcampaign", "shards"])
def test_links_in_a_folder_are_refused(name):
    folder = folder_of()
    place = folder.path / name
    place.rename("moved") if place.exists() else Path("moved").touch()
    place.symlink_to(Path("moved").absolute())
    with pytest.raises(DataFileError, match="is a link"):
        CampaignFolder.open(folder.path)


def test_a_link_in_the_place_of_a_shard_is_refused(capsys):
    folder = folder_of()
    folder.shard(Shard()).symlink_to("nowhere")
    for action in ("status", "report", "combine", "resume"):
        assert main(["campaign", action, str(folder.path)]) == 2
        assert "is a link" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_a_shard_without_a_byte_is_named(capsys):
    """Its process ended before it wrote anything; `resume` begins it anew."""
    folder = folder_of()
    folder.shard(Shard(1, 2)).touch()
    store = CampaignStore.begin(folder.shard(Shard(0, 2)), folder.info())
    store.close()
    assert main(["campaign", "status", "c"]) == 0
    assert "ended before it wrote anything: shard 2-of-2" in " ".join(capsys.readouterr().out.split())
    for action in ("report", "combine"):
        assert main(["campaign", action, "c"]) == 0
    folder.shard(Shard(1, 2)).write_bytes(b"x")
    assert main(["campaign", "status", "c"]) == 2


@pytest.mark.parametrize("linked", ["scripts", "scripts/one", "scripts/one/cause.json"])
def test_scripts_are_not_read_through_a_link(linked):
    """They would be those of another campaign, which a report then prints."""
    write_cause(Path("scripts/one"), CauseFile("mismatch", "[]"))
    assert read_causes(Path("scripts"))
    Path(linked).rename("moved")
    Path(linked).symlink_to(Path("moved").absolute())
    assert not read_causes(Path("scripts"))


def test_settings_are_not_written_through_a_link(victim, monkeypatch):
    folder = folder_of()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    for name in ("campaign.json.part", "campaign.json.known.part", "programs.shadowzoo.known.part"):
        (folder.path / name).symlink_to(victim)
    CampaignFolder.create(folder.path, folder.settings, Path("programs"))
    assert victim.read_text() == PRECIOUS


def test_processes_that_start_together_write_one_folder():
    """Shards on several machines: each writes the settings, and none takes the file that another has not finished."""
    path = Path("shared")
    with atomic_write(path, shared=True) as first:
        first.write(b"first")
        with atomic_write(path, shared=True) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert [p.name for p in Path().iterdir()] == ["shared"]


@pytest.mark.parametrize("ending", ["", "-journal", "-wal"])
def test_a_combined_store_is_not_written_through_a_link(ending):
    folder = folder_of()
    Path(f"c/campaign.shadowcampaign.part{ending}").symlink_to(Path("made").absolute())
    combine(folder.combined, [], folder.info())
    assert not os.path.lexists("made")
    CampaignStore.open(folder.combined).close()


@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_what_is_no_lock_lets_nobody_write(what):
    """Two processes took it for a file system without locks, and ran one shard."""
    folder = folder_of()
    lock = Path("c/shards/1-of-1.shadowcampaign-lock")
    lock.mkdir() if what == "a folder" else lock.symlink_to("made")
    with pytest.raises(DataFileError, match=f"its lock '1-of-1.shadowcampaign-lock' is {what}"):
        CampaignStore.begin(Path("c/shards/1-of-1.shadowcampaign"), folder.info())
    assert not os.path.lexists("made")


def test_programs_of_any_size_are_not_read():
    """A file of holes takes no disk space, and its hash hours."""
    folder = folder_of()
    with folder.programs.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataFileError, match="have more than 1 GiB"):
        folder.check_programs()


def test_programs_of_any_size_are_not_read_on_another_machine_either(tmp_path, monkeypatch):
    """There a file may have the same path: the programs are sent if it is no file of programs."""
    path = tmp_path / "programs"
    path.write_bytes(b"programs")
    job = {"settings": {"programs": str(path)}, "digest": campaign_folder.digest_of(path)}
    asked = []
    monkeypatch.setattr(executors, "_kept_for", lambda *_: asked.append(1) or SimpleNamespace(run=lambda _: b"rows"))
    monkeypatch.setattr(executors, "_idle", [])
    assert executors.run_chunk(job, 0, 1, 0) == b"rows"
    monkeypatch.setattr(campaign_folder, "_MAX_PROGRAMS", 7)
    assert executors.run_chunk(job, 0, 1, 0) == executors.NO_PROGRAMS
    for odd in (tmp_path, tmp_path / "absent", tmp_path / ("n" * 300), Path("/dev/null")):
        assert executors.run_chunk(job | {"settings": {"programs": str(odd)}}, 0, 1, 0) == executors.NO_PROGRAMS
    assert asked == [1]


def test_a_folder_in_the_place_of_a_file_is_an_error():
    folder = folder_of()
    Path("c/campaign.shadowcampaign.part").mkdir()
    with pytest.raises(DataFileError, match="cannot be written"):
        combine(folder.combined, [], folder.info())


@needs_pipes
@pytest.mark.parametrize("name", ["programs.shadowzoo", "campaign.json"])
def test_a_pipe_in_a_folder_does_not_block(name, capsys):
    folder = folder_of()
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)
    assert main(["campaign", "resume", str(folder.path)]) == 2
    assert "shadowrun explain campaign-folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "facts",
    [
        {"n": 1 << 63},
        {"timeout_s": 1e300},
        {"targets": ["cpu"] * 2000},
        {"mutators": ["insert"] * 2000},
        {"compile": ["eager"] * 2000},
    ],
    ids=str,
)
def test_settings_are_bounded(facts):
    folder = folder_of()
    changed(folder, **facts)
    with pytest.raises(DataFileError) as raised:
        CampaignFolder.open(folder.path)
    assert raised.value.slug == "data-file-corrupt"


def test_any_number_of_variants_takes_little():
    table = SeenVariants(Path("claims"), 10**15)
    assert table.mark_seen(5, 3) == 3
    table.close()
    assert Path("claims").stat().st_size <= 1 << 30
    assert _n_of(10**15 + 7, Shard(2, 3)) == 333333333333300
    assert sum(_n_of(1234, Shard(i, 5)) for i in range(5)) == 1234
    assert _n_of(CHUNK, Shard(3, 8)) == 0


def test_a_backend_that_only_a_folder_names_is_not_looked_for(capsys):
    folder = folder_of()
    changed(folder, compile=["tvm\x1b[31m"])
    for action in (["resume", "c"], ["repro", "c"], ["reproduce", "c", "1"]):
        assert main(["campaign", *action]) == 2
        assert "module-refused" in (said := capsys.readouterr().err)
        assert "\x1b" not in said


def test_a_lock_that_may_not_be_opened_is_an_error(tmp_path, monkeypatch):
    """An archive carries a file of mode 000, which only root opens."""
    lock = tmp_path / "x.shadowrun-lock"
    monkeypatch.setattr(os, "open", lambda path, *_: raised(PermissionError(errno.EACCES, "no", path)))
    assert not FileLock(tmp_path / "x.shadowrun").contested  # the folder has none: it may not be written
    lock.write_bytes(b"")
    with pytest.raises(DataFileError, match="may not open"):
        FileLock(tmp_path / "x.shadowrun")


def raised(error):
    raise error


def test_imports_do_not_let_a_file_choose_the_backend_of_another_package(tmp_path, monkeypatch, capsys):
    """Users of a package name its module always."""
    (tmp_path / "site" / "other-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    entry = "[torch_dynamo_backends]\nother = other_module:f\n"
    (tmp_path / "site" / "other-1.0.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = folder_of()
    changed(folder, compile=["other"])
    assert main(["campaign", "resume", "c", "--import", "json"]) == 2
    assert "--import other_module. " in capsys.readouterr().err
    args = argparse.Namespace(target=[], ref=None, imports=["json", "other_module"])
    campaign_findings.may_start(CampaignFolder.open(folder.path), args)
    spec = CompileSpec("other", "json", False, True, None, {}, None)
    with pytest.raises(UsageError, match="--import other_module "):
        spec.from_file(Permissions(imports=("json",)))
    assert spec.from_file(Permissions(imports=("json", "other_module"))) == spec


def test_imports_do_not_let_a_file_choose_a_backend_of_torch_that_imports_another_package(capsys):
    folder = folder_of()
    changed(folder, compile=["tvm"])
    for named in ("json", "torch", "torch._dynamo", "torch._dynamo.backends"):
        assert main(["campaign", "resume", "c", "--import", named]) == 2
        assert "--import torch._dynamo.backends.tvm. " in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"--import torch\._dynamo\.backends\.tvm "):
        CompileSpec("tvm", "json", False, True, None, {}, None).from_file(Permissions(imports=("json",)))
    args = argparse.Namespace(target=[], ref=None, imports=["torch._dynamo.backends.tvm"])
    campaign_findings.may_start(CampaignFolder.open(folder.path), args)
    changed(folder, compile=["no_backend"])
    assert main(["campaign", "resume", "c", "--import", "json"]) == 2
    assert "--import MODULE. " in capsys.readouterr().err


@pytest.mark.parametrize("wrapped", [lambda f: f, partial, lambda f: aot_autograd(fw_compiler=partial(f))])
def test_a_package_that_was_named_stands_for_its_modules(monkeypatch, wrapped):
    def compiler():
        """In a module of the package `vendor`, whose import registered it."""

    compiler.__module__ = "vendor.backend"
    monkeypatch.setitem(registry._COMPILER_FNS, "vendored", wrapped(compiler))
    folder = folder_of()
    changed(folder, compile=["vendored"])
    folder = CampaignFolder.open(folder.path)
    campaign_findings.may_start(folder, argparse.Namespace(target=[], ref=None, imports=["vendor"]))
    with pytest.raises(UsageError, match=r"--import vendor\.backend\."):
        campaign_findings.may_start(folder, argparse.Namespace(target=[], ref=None, imports=["vend"]))


def test_a_file_chooses_no_function_of_a_module_that_was_named():
    """With `--import os`, a file would have called `os.system`; a platform's name is no module's."""
    spec = CompileSpec("system", "os", True, True, None, {}, None)
    for allowed in (Permissions(), Permissions(imports=("os",)), Permissions(("os", "os:system"))):
        with pytest.raises(UsageError, match=r"--import os:system \(in Python: allow=\['os:system'\]\)"):
            spec.from_file(allowed)
    assert spec.from_file(Permissions(imports=("os:system",))) == spec
    registered = CompileSpec("other", "npu", False, True, None, {}, None)
    with pytest.raises(UsageError, match="--import npu "):
        registered.from_file(Permissions(("npu",)))
    assert registered.from_file(Permissions(imports=("npu",))) == registered
    with pytest.raises(UsageError, match="cannot import the backend"):
        replace(spec, name="a; b", importable=False).from_file(Permissions(imports=("os",)))
    for module in ("", "os"):
        with pytest.raises(ValueError, match="a; b"):
            CompileSpec.from_text(replace(spec, name="a; b", module=module).text())


def test_a_report_is_of_the_folder():
    """A combined store of another campaign would be shown under the flaws and names of this one."""
    folder = folder_of()
    combine(folder.combined, [], CampaignInfo("another", ("npu",), "cpu"))
    with pytest.raises(DataFileError, match="another campaign"):
        campaign_findings.opened_store(folder)


# -- stores ------------------------------------------------------------------------------------------------

INFO = CampaignInfo("campaign", ("npu",), "cpu")


def store_of(path, info=INFO):
    store = CampaignStore.begin(Path(path), info)
    with store.written():
        store.add_variant(VariantRow(0, "program", 7, mutators=("insert",)))
        store.add_result(ResultRow(0, 0, "ok", ops={"aten::mm": "ok"}))
    store.close()
    return Path(path)


def edit(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize("table", ["name", "op"])
def test_numbers_that_do_not_fit_two_bytes_are_refused(table):
    """Packing the next one would have failed while results are written."""
    path = store_of("s")
    more = ("90000, 'x'",) if table == "name" else ("90000, 1, 'ok'",)
    edit(path, f"insert into {table} values ({more[0]})")
    for act in (lambda: CampaignStore.open(path), lambda: CampaignStore.begin(path, INFO)):
        with pytest.raises(DataFileError) as raised:
            act()
        assert raised.value.slug == "data-file-corrupt"


def test_operators_of_many_stores_fit_two_bytes():
    store = CampaignStore.begin(Path("s"), INFO)
    with store.written():
        store.add_variant(VariantRow(0, "program", 7))
        for number in range(1, 70):
            store.add_variant(VariantRow(number, "program", 7 + number))
            store.add_result(ResultRow(number, 0, "ok", ops={f"aten::x{number * 1000 + k}": "ok" for k in range(1000)}))
    store.close()
    CampaignStore.open(Path("s")).close()


def test_a_shard_with_other_targets_is_of_another_campaign():
    """It says that it is of this one; its results on a second target would damage the combined store for good."""
    other = store_of("other", CampaignInfo("campaign", ("npu", "second"), "cpu"))
    store = CampaignStore.begin(Path("s"), INFO)
    with pytest.raises(DataFileError, match="another campaign"):
        add_rows(store, other)
    store.close()


def test_a_recorded_recipe_is_checked_before_it_runs(capsys):
    folder = folder_of()
    path = folder.shard(Shard())
    store = CampaignStore.begin(path, folder.info())
    with store.written():
        store.add_variant(VariantRow(3, "program", 7))
        store.add_result(ResultRow(3, 0, "finding"), "[1, 2, 3]")
    store.close()
    assert main(["campaign", "reproduce", "c", "3"]) == 2
    assert "data-file-corrupt" in capsys.readouterr().err


def test_a_long_recipe_reaches_its_worker(capsys):
    """As an argument of a process it would be longer than the system allows."""
    folder_of()
    program = from_json(MM).identity()[:12]
    recipe = json.dumps([program, [["insert", *["x" * 199] * 50]] * 60, 1])
    assert len(recipe) > 1 << 17
    assert main(["campaign", "reproduce", "c", recipe]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_no_call_is_taken_from_the_folder_of_scripts(tmp_path):
    """Any operator is called again from the file that a variant leaves that ends its process; it must be ours."""
    settings = {"out": str(tmp_path / "out"), "caught": str(tmp_path / "ours"), "limits": [1.0, 1 << 30]}
    hostile = tmp_path / "out" / "x" / "caught"
    hostile.mkdir(parents=True)
    call = captured_inputs.StoredCall("aten::from_file", (str(tmp_path / "made"), True, 100), {})
    captured_inputs.save(hostile, "0.pt", call)
    sent = []

    class Channel:
        class step:
            begin = end = staticmethod(lambda *_: None)

        send = staticmethod(sent.append)

    from shadowrun.studies.campaign.run_variants import RunnerSettings

    task = {
        "number": 1,
        "stage": "end",
        "signature": ["crash", "aten::mm", "", "", ""],
        "explanations": ["x"],
        "target": 0,
        "recipe": ["ab", [], 0],
        "folder": "x",
    }
    _Writer(settings, Channel(), Library({}), RunnerSettings(("cpu",))).run(task)
    assert "does not end any more" in sent[0]["notes"][0]
    assert not (tmp_path / "made").exists()


# -- the ledger ----------------------------------------------------------------------------------------------


def test_a_ledger_is_not_written_through_a_link(victim):
    from shadowrun.studies.known_issues_file import NewLine, add_lines

    Path(".shadowrun.part").symlink_to(victim.parent)
    (victim.parent / "shadowrun.toml").write_text(PRECIOUS)
    add_lines(Path("shadowrun.toml"), [NewLine("aten::mm", "npu", "mismatch", "why")])
    assert (victim.parent / "shadowrun.toml").read_text() == PRECIOUS
    assert "aten::mm" in Path("shadowrun.toml").read_text()


@pytest.mark.parametrize("target", ["[a-z]pu", "cp[a-u]", "*", "npu?", "n[!x]u"])
def test_a_line_of_the_ledger_covers_one_platform(target):
    from shadowrun.studies.campaign.causes.root_causes import Seen, root_causes
    from shadowrun.studies.campaign.run_variants import VariantFinding

    causes = root_causes([Seen(0, 0, 1, VariantFinding("aten::mm", "f32", "mismatch"))], 2)
    made, skipped = new_lines(list(enumerate(causes, 1)), (target, "cpu"), (), "c")
    assert not made
    assert skipped


def test_settings_of_a_platform_are_no_set_of_characters():
    assert not fits_platform("cp[u=x]", "cpu")
    assert fits_platform("cpu[threads=1]", "cpu[threads=1]")
    assert fits_platform("[cn]pu", "npu")


def test_the_user_may_name_a_backend():
    folder = folder_of(compile=("tvm",))
    args = build_parser().parse_args(["campaign", "resume", "c", "--import", "torch._dynamo.backends.tvm"])
    campaign_findings.may_start(folder, args)
    with pytest.raises(UsageError, match="module"):
        campaign_findings.may_start(folder, build_parser().parse_args(["campaign", "resume", "c"]))


# -- what it may cost --------------------------------------------------------------------------------------


def test_the_file_of_a_zoo_counts_and_is_packed(monkeypatch):
    """Its option is a path and no text; and its bytes are those before it is unpacked."""
    zoo_of("other.shadowzoo", MM)
    seen = []
    monkeypatch.setattr(cli, "ResourceLimits", SimpleNamespace(for_files=lambda *given: seen.append(given)))
    assert main(["zoo", "list", "--zoo", "other.shadowzoo"]) == 0
    ((words, packed),) = seen
    assert "other.shadowzoo" in list(words)
    n_bytes = Path("other.shadowzoo").stat().st_size
    assert ResourceLimits.for_files(["other.shadowzoo"], packed).n_bytes == packed * n_bytes > n_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not known")
def test_memory_of_a_variant_is_what_there_is_at_most(monkeypatch):
    monkeypatch.setattr(limits, "_available_bytes", lambda: 10 << 30)
    assert at_most_free(1 << 62) == 9 << 30
    assert at_most_free(5) == 5
    monkeypatch.setattr(limits, "_available_bytes", lambda: 1 << 20)
    assert at_most_free(1 << 62) == 1 << 30  # nothing would run in less
    monkeypatch.setattr(limits, "_available_bytes", lambda: None)
    assert at_most_free(1 << 62) == 1 << 62


def test_a_campaign_takes_what_there_is_at_most(monkeypatch):
    given = []
    monkeypatch.setattr(limits, "_available_bytes", lambda: 10 << 30)
    monkeypatch.setattr(engine, "Pool", lambda *args: given.append(args[3]) or Stopped())
    Engine(folder_of(memory_bytes=1 << 62)).run()
    assert given[0].n_bytes == 9 << 30


class Stopped:
    """A pool that has nothing to run."""

    def run(self):
        """End."""

    close = run
