"""The text of scripts: one golden file for each kind, and no text of a file becomes code.

python -m tests.repro.test_script        writes the golden files again; look at the difference
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.repro import graph_fields
from shadowrun.repro.platform_setup import PlatformSetup, platform_setup_of
from shadowrun.repro.quoting import Code, code, dotted_name, literal
from shadowrun.repro.result_checks import Check
from shadowrun.repro.script import EXIT_STATUS, ScriptSpec, render, templates
from shadowrun.repro.snippet import snippet

GOLDEN = Path(__file__).parent / "golden"
PACKAGE = Path(__file__).parents[2] / "shadowrun"
TEMPLATES = PACKAGE / "repro" / "templates"
CPU = PlatformSetup("cpu", "cpu")
SIM = platform_setup_of("npu:1", {"simulated_flaws": ["softmax-error"]})
PROCESS = platform_setup_of("cpu[isa=default,threads=1]", {})
PLAIN = ScriptSpec(
    kind="mismatch",
    title="aten::maximum is wrong on npu:1: implementation.",
    story=("Seen by shadowrun in call 7, forward.", "", EXIT_STATUS),
    inputs={"self": torch.zeros(2), "other": torch.zeros(2)},
    target=SIM,
    ref=CPU,
    operator="aten::maximum",
    lines=(code('out = torch.ops.aten.maximum.default(x["self"], x["other"])'),),
    results={"output 0": code("out")},
    checks=(Check("output 0", 2.0**-20),),
)
STORED = (Check("output 0", torch.zeros(2), strides=True, signed_zeros=True),)


def changed(kind, **values):
    return dataclasses.replace(PLAIN, kind=kind, **values)


def itself(variant, target=CPU):
    values = {"variant": variant, "batched": ["self"], "item": 1, "written": "self", "in_place": None}
    return changed("itself", target=target, ref=dataclasses.replace(CPU, name="cpu alone"), values=values)


def graph(*, raises):
    module = fx.symbolic_trace(lambda x, y: (x.masked_fill(x < y, float("-inf")), y.add_(1)))
    how = CompileSpec("inductor", "", False, True, None, {"max_autotune": True}, True)
    fields = graph_fields(module, how, (1,), raises=raises)
    return ScriptSpec("graph", "aten.mm, compiled with inductor, is wrong", PLAIN.story, {"inputs": []}, **fields)


SPECS = {
    "mismatch": PLAIN,
    "mismatch-in-processes": changed("mismatch", target=PROCESS, checks=STORED),
    "mismatch-flushing": changed("mismatch", target=platform_setup_of("cpu[flush_denormal=on]", {})),
    "unstable": changed("unstable", inputs={"self": torch.zeros(2, 2).t()}, on_cpu=("other",)),
    "raises": changed("raises"),
    "raises-in-processes": changed("raises", target=PROCESS),
    "accepts": changed("accepts"),
    "fallback": changed("fallback", values={"key": "PrivateUse1"}),
    "slow": changed("slow", values={"ratio": 10.0}),
    "memory": changed("memory", values={"written": ("self",), "returned": {"self": code("out")}}),
    "itself-tail": itself("tail"),
    "itself-slice": itself("slice"),
    "itself-strided": itself("strided", SIM),
    "itself-transposed": itself("transposed", PROCESS),
    "ends": changed("ends", ref=SIM, values={"seconds": 60.0, "n_bytes": 4 << 30}),
    "graph": graph(raises=False),
    "graph-raises": graph(raises=True),
}
ISA = platform_setup_of("cpu[isa=default]", {})
# Of these, short scripts have lines that no golden file has.
GENERATED = SPECS | {
    "mismatch-environment": changed("mismatch", target=ISA),
    "itself-environment": itself("transposed", ISA),
    "itself-reversed": itself("reversed"),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_text_is_that_of_the_golden_file(name):
    text = render(SPECS[name])
    compile(text, name, "exec")
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert "\n\n\n\n" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


# Comments that declare an encoding in which a later character of them ends the line (PEP 263).
DECLARING = [
    "coding: utf-7 +AAo-exit(1)+AAo-#",
    "vim: set fileencoding=utf-7 : +AAo-exit(1)+AAo-#",
    "-*- coding:utf-7 -*- +AAo-exit(1)+AAo-#",
    "codingcoding:: utf-7 +AAo-exit(1)+AAo-#",
    "coding: unicode_escape\nexit(1)\n#",
    "coding: raw_unicode_escape \\u000aexit(1)\\u000a#",
    "coding: raw_unicode_escape \u2028exit(1)\u2028#",
]
EVIL = ['"""; exit(1)', "'; exit(1) #", "\\", "\n    exit(1)\n", "{{ exit() }}", "{exit()}", "}", "\u202e\ud800"]
EVIL += DECLARING


def spoiled(value, text):
    """A value with each text in it replaced, unless it is code."""
    if isinstance(value, Code) or value is None:
        return value
    if isinstance(value, str):
        return text
    if isinstance(value, tuple) and not dataclasses.is_dataclass(value):
        return tuple(spoiled(v, text) for v in value)
    if isinstance(value, dict):
        return {spoiled(k, text): spoiled(v, text) for k, v in value.items()}
    return value


def structure(text):
    """A program without the values of its constants, decoded as Python decodes a file."""
    tree = ast.parse(text.encode())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.parametrize("name", GENERATED)
def test_texts_of_a_file_change_nothing_but_constants(name, text):
    """Title, story, names of results and platforms, environment: whatever they say, the program is the same."""
    spec = GENERATED[name]
    bad = spec_saying(spec, text)
    for script, spoiled_script in zip(scripts_of(spec), scripts_of(bad), strict=True):
        assert structure(spoiled_script) == structure(script)


def spec_saying(spec, text):
    """What a script shows, with a text of a file wherever one may stand."""
    if spec.target is None:
        return dataclasses.replace(spec, title=text, story=spoiled(spec.story, text))
    environment = {text + str(i): text for i, _ in enumerate(spec.target.environment)}
    place = dataclasses.replace(spec.target, name=text, environment=environment)
    values = {k: v if k in ("variant", "returned") else spoiled(v, text) for k, v in spec.values.items()}
    return dataclasses.replace(
        spec, title=text, story=spoiled(spec.story, text), operator=text, target=place,
        ref=dataclasses.replace(spec.ref, name=text), results=spoiled(spec.results, text),
        checks=tuple(dataclasses.replace(c, name=text) for c in spec.checks), on_cpu=spoiled(spec.on_cpu, text),
        values=values,
    )  # fmt: skip


def scripts_of(spec):
    """The long script, and the short one where there is one."""
    return [render(spec), *filter(None, [snippet(spec)])]


def test_the_texts_above_go_through_every_template():
    templates.cache_clear()
    for spec in GENERATED.values():
        scripts_of(spec)
    assert {name for _, name in templates().cache} == {path.name for path in TEMPLATES.iterdir()}


def values_in_comments(text):
    """Expressions behind `#` that may declare an encoding."""
    comments = re.findall(r"#(.*)", text)
    found = [value for line in comments for value in re.findall(r"\{\{(.*?)\}\}", line)]
    return [value for value in found if not re.fullmatch(r" \w+ \| in_comment ", value)]


def test_templates_put_values_behind_a_hash_by_one_function_only():
    assert [value for path in TEMPLATES.iterdir() for value in values_in_comments(path.read_text("utf-8"))] == []
    assert values_in_comments("x  # {{ title }} {{ title | in_comment }}") == [" title "]


@pytest.mark.parametrize("text", EVIL)
def test_options_of_a_backend_are_constants(text):
    module = fx.symbolic_trace(lambda x: x + 1)

    def script(words):
        how = CompileSpec(words, "", False, True, None, {words: [words, {words: 1}]}, None)
        return render(ScriptSpec("graph", "t", (), {}, **graph_fields(module, how, (), raises=False)))

    assert structure(script(text)) == structure(script("a"))


@pytest.mark.parametrize("text", ["a b", "os; x", "a.", "", "a\nb", "a(", "é"])
def test_names_have_the_characters_of_names(text):
    with pytest.raises(ValueError, match="is no name"):
        dotted_name(text)
    with pytest.raises(ValueError, match="is no name"):
        render(changed("raises", imports=(text,)))


def test_code_stays_code_and_nothing_else_does():
    assert literal(code("out[{}]", 1)) == "out[1]"
    assert literal("out[1]") == '"out[1]"'
    assert code("x[{}]", 'a"]; exit()') == "x['a\"]; exit()']"


def is_constant(node):
    """A text of the source: written there, or named by an upper-case name."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def unsafe_code(tree, *, quoting=False):
    """Lines that make code of something else than constants of the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            made = node.func.id == "Code" and not quoting
            computed = node.func.id == "code" and not (node.args and is_constant(node.args[0]))
            if made or computed:
                yield node.lineno


def test_only_the_module_of_quoting_makes_code():
    found = []
    for folder in ("repro", "compiled", "studies"):
        for file in (PACKAGE / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if "repro.quoting" in text:
                found += [f"{file.name}:{line}" for line in unsafe_code(ast.parse(text))]
    assert found == []


@pytest.mark.parametrize("text", ["Code(x)", "code(x)", "code(f'{x}')", "code('a' + x)", "code(x.lower())"])
def test_the_rule_sees_a_violation(text):
    assert list(unsafe_code(ast.parse(text)))


if __name__ == "__main__":
    for name, spec in SPECS.items():
        (GOLDEN / f"{name}.txt").write_text(render(spec), encoding="utf-8")
