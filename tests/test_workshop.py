"""The README, the CI script and the examples do what they say."""

import ast
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/[0-9][0-9]_*/run.*"))
TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_readme_and_ci_run_the_same_test_command():
    install, _, test = re.search(r"^(pip install .*test.*)$", read("README.md"), re.MULTILINE)[1].partition(" && ")
    script = read(".ci/run")
    assert install.replace("pip install", "pip install --quiet") in script
    assert script.rstrip().endswith(test + ' "$@"')
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR


def test_every_install_command_uses_the_tested_versions():
    for name in (*TEXTS, ".ci/run", "noxfile.py"):
        for line in read(name).splitlines():
            if re.search(r"pip install|session\.install", line):
                assert "constraints.txt" in line, f"{name}: {line}"


def test_constraints_name_every_dependency():
    import tomllib

    project = tomllib.loads(read("pyproject.toml"))["project"]
    pinned = set(re.findall(r"^([\w-]+)==", read("constraints.txt"), re.MULTILINE))
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} <= pinned


def anchors(text):
    """Anchors of the headings of a page, as GitHub and MyST make them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ (.+)$", outside, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        yield re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def dead_links(page, text):
    """Links of a page to files or headings that are not there."""
    outside = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", outside):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" in target:
            continue
        if not file.exists():
            yield target
        elif anchor and file.suffix == ".md":  # Sphinx makes the headings of the command line
            there = text if file == page else file.read_text(encoding="utf-8")
            if anchor not in anchors(there) and file.name != "cli.md":
                yield target


@pytest.mark.parametrize("name", [*TEXTS, *(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/**/*.md"))])
def test_links_lead_somewhere(name):
    assert list(dead_links(ROOT / name, read(name))) == []


def test_a_dead_link_is_seen():
    text = "# A `b` (c)\n[x](none.md) [x](README.md#none) [x](#a-b-c) [x](#d) `[x](no)` [x](https://a.invalid/#b)"
    assert list(dead_links(ROOT / "README.md", text)) == ["none.md", "README.md#none", "#d"]


def test_the_reference_of_the_api_has_every_public_name():
    import shadowrun

    text = read("docs/reference/api.md")
    missing = [n for n in shadowrun.__all__ if not re.search(rf":: (shadowrun\.)?(\w+\.)*{n}$", text, re.MULTILINE)]
    assert missing == []


def test_troubleshooting_has_every_message():
    listed = set(re.findall(r"messages\.md#([\w-]+)", read("docs/troubleshooting.md")))
    assert set(re.findall(r"^### (.+)$", read("docs/messages.md"), re.MULTILINE)) - listed == set()


def test_readme_commands_exist():
    from shadowrun.cli.main import COMMANDS, build_parser

    parser = build_parser()
    commands = re.findall(r"^(?:.* && )?shadowrun (.+)$", read("README.md"), re.MULTILINE)
    commands = [c.partition("#")[0] for c in commands if c.split()[0] in COMMANDS]
    assert len(commands) == 16
    for command in commands:
        parser.parse_args(command.split())


def test_every_example_has_a_readme_and_is_listed():
    assert len(EXAMPLES) >= 4
    for example in EXAMPLES:
        assert (example.parent / "README.md").is_file()
        assert f"]({example.parent.name})" in read("examples/README.md")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.parent.name)
def test_example_runs(forked_processes, example, tmp_path):
    import os

    command = [sys.executable] if example.suffix == ".py" else ["bash"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, str(example)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


CLOCK = re.compile(r"(time\.)?(monotonic|perf_counter|process_time|thread_time|time)(_ns)?")


def is_late(node, timed):
    """Whether code has a reading of a clock, or of what names hold, from `timed`."""
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and CLOCK.fullmatch(ast.unparse(n.func)):
            return True
        if isinstance(n, ast.Name) and n.id in timed:
            return True
    return False


def timed_assertions(source):
    """Lines that assert that something took no longer than a limit; not those that wait for it in a loop."""
    tree = ast.parse(source)
    waits = {a for loop in ast.walk(tree) if isinstance(loop, ast.While) for a in ast.walk(loop)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        timed = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_late(node.value, timed):
                timed |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and node not in waits:
                for comparison in ast.walk(node.test):
                    if isinstance(comparison, ast.Compare):
                        sides = [comparison.left, *comparison.comparators]
                        for left, op, right in zip(sides, comparison.ops, sides[1:], strict=False):
                            small = {ast.Lt: left, ast.LtE: left, ast.Gt: right, ast.GtE: right}.get(type(op))
                            if small is not None and is_late(small, timed):
                                yield node.lineno


def test_no_test_judges_by_time():
    """On a busy machine everything takes longer: such a test fails where nothing is wrong."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    assert len(files) > 200
    assert [f"{file}:{line}" for file in files for line in timed_assertions(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("began = time.monotonic()\n f()\n assert time.monotonic() - began < 20", True),
        ("began = perf_counter()\n f()\n took = perf_counter() - began\n assert x, took\n assert 0 < took <= 5", True),
        ("began = time.time_ns()\n spent = time.time_ns() - began\n assert 5e9 >= spent", True),
        ("began = time.monotonic()\n assert time.monotonic() - began > 0.005", False),
        ("end = time.monotonic() + 20\n while f():\n  assert time.monotonic() < end", False),
        ("now = time.monotonic()\n assert g(now) == 3\n assert n < 4", False),
    ],
)
def test_a_judgement_by_time_is_seen(body, wrong):
    assert bool(list(timed_assertions(f"def test():\n {body}"))) == wrong


def test_no_path_of_a_machine_in_any_text():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in tracked or TEXTS:
        if Path(name).suffix in (".md", ".py", ".toml", ".txt", "") and name != "tests/test_workshop.py":
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            assert not re.search(r"/(?:work|root)/|files\.pythonhosted|pypi\.org", text), name
