import json

import pytest

from shadowrun.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "my.zoo"
    assert main(["zoo", "add", "modules", "nn.Linear", "nn.GELU", "nn.Bilinear", "--zoo", str(path)]) == 0
    assert main(["zoo", "add", "subgraphs", "--zoo", str(path)]) == 0
    return path


def as_json(capsys, *words):
    capsys.readouterr()
    assert main(["zoo", *words, "-f", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_zoo_counts_what_came_in_and_out(zoo, capsys):
    data = as_json(capsys, "list", "--zoo", str(zoo))
    steps = {(s["source"], s["step"]): s for s in data["stages"]}
    kept = steps["modules", "different graphs"]
    assert kept["out"] == sum(p["source"] == "modules" for p in data["programs"])
    assert kept["in"] == kept["out"] + len(kept["left_out"])
    assert {p["source"] for p in data["programs"]} == {"modules", "subgraphs"}
    left_out = as_json(capsys, "list", "--left-out", "subgraphs", "--zoo", str(zoo))["left_out"]
    assert {row["reason"][:17] for row in left_out} == {"the same graph as"}


def test_adding_a_source_again_replaces_it(zoo, capsys):
    before = as_json(capsys, "list", "--zoo", str(zoo))
    assert main(["zoo", "add", "subgraphs", "--zoo", str(zoo)]) == 0
    assert as_json(capsys, "list", "--zoo", str(zoo))["digest"] == before["digest"]


def test_a_program_is_shown_by_its_id_or_name(zoo, capsys):
    (one, *_) = as_json(capsys, "list", "--zoo", str(zoo))["programs"]
    assert as_json(capsys, "show", one["id"][:8], "--zoo", str(zoo))["name"] == one["name"]
    assert main(["zoo", "show", one["name"], "--script", "--zoo", str(zoo)]) == 0
    assert "aten::" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["add"], "zoo-source"),
        (["add", "models"], "zoo-source"),
        (["add", "modules", "nn.NoSuch"], "zoo-source"),
        (["list", "--left-out", "models"], "zoo-source"),
        (["show", "zzzz"], "zoo-unknown-program"),
        (["show"], "zoo-unknown-program"),
        (["list", "--zoo", "none"], "zoo-missing"),
    ],
)
def test_errors_say_what_to_do(zoo, capsys, words, slug):
    assert main(["zoo", *words, *([] if "--zoo" in words else ["--zoo", str(zoo)])]) == 2
    assert f"shadowrun explain {slug}" in capsys.readouterr().err
