"""Explain an error message, the facts that shadowrun has on an operator, or the verdict on a recorded call.

For an operator: its bounds with their sources, results that its definition leaves open, and how its calls are treated.
For a call: the rung of the ladder that decided, with its figures. If the inputs of the call were kept, the call runs on
both platforms and is judged again, and each step of the judge is listed; `shadowrun explain verdicts` describes the
rungs. An error message ends in the command that prints its entry. Other names are pages of the documentation.

Examples:
  shadowrun explain aten::mm                    the facts on a matrix product
  shadowrun explain softmax                     the same for aten::softmax
  shadowrun explain 578                         call 578 of the last run
  shadowrun explain npu.shadowrun 578           of another run
  shadowrun explain npu.shadowrun --finding 3   the call that shows a finding
  shadowrun explain 578 -f json                 the steps for a program
  shadowrun explain unknown-device              an error message: its cause, and what to do
  shadowrun explain howto/drift                 a page of the documentation
  shadowrun explain --list                      the names of all messages and pages
  shadowrun explain --page                      the page of all operators in the documentation

Exit status:
  0 explained, 2 wrong usage
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import defaultdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import sanitize

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from shadowrun.judge.decision_trace import Step
    from shadowrun.report.document import Block, Document, Section
    from shadowrun.repro.call_replayer import Explanation
    from shadowrun.run import Run

__all__ = ["add_arguments", "find_page", "page_names", "run"]

# The pages of the documentation that come with the package, and the entries of the page of messages.
#
# A wheel has them in the folder `pages`, which the build fills from ``docs/``; a source tree has ``docs/`` itself.

_PACKAGE: Final = Path(__file__).parents[2]
_MESSAGES: Final = "messages"
_ENTRY: Final = re.compile(r"^### (\S+)\n(.*?)(?=^#{1,3} |\Z)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_N_NEAR: Final = 5


class Text(NamedTuple):
    """A text of the documentation.

    Attributes:
        name: Of the entry or page.
        body: Its Markdown, without the heading; links lead to a command or an address.
    """

    name: str
    body: str


def find_page(name: str) -> Text | None:
    """The entry of a message (``unknown-device``) or a page (``howto/drift``); None if the word can be an operator.

    Raises:
        UsageError: It can be no operator, and nothing has this name.
    """
    if not re.fullmatch(r"[a-z0-9_/-]+(\.md)?", name):
        return None
    pages, entries = _pages(), _entries()
    page = name.removesuffix(".md")
    if name in entries:
        return Text(name, _with_commands(entries[name], _MESSAGES, pages))
    if page in pages:
        _, _, body = pages[page].read_text(encoding="utf-8").partition("\n")
        return Text(page, _with_commands(re.sub(r"<!--.*?-->\n?", "", body), page, pages))
    if "-" in name or "/" in name:  # in no operator's name
        raise UsageError(
            f"No message and no page of the documentation is called {name!r}. {_near(name, [*entries, *pages])}",
            slug="unknown-message",
        )
    return None


def page_names() -> tuple[list[str], list[str]]:
    """Names of all entries, and of all pages."""
    return list(_entries()), sorted(_pages())


def _near(name: str, known: Iterable[str]) -> str:
    # The last part alone too: `explain drift` should find `howto/drift`.
    by_word = {word: whole for whole in known for word in (whole, whole.rpartition("/")[2])}
    near = dict.fromkeys(by_word[word] for word in get_close_matches(name, by_word, _N_NEAR, 0.5))
    if not near:
        return "`shadowrun explain --list` lists all."
    return f"Did you mean {' or '.join(map(repr, near))}? `shadowrun explain --list` lists all."


def _pages() -> dict[str, Path]:
    """Pages by name: ``messages``, ``howto/drift``."""
    inside = _PACKAGE / "pages"
    root = inside if inside.is_dir() else _PACKAGE.parent / "docs"
    files = (file for folder in ("", "howto", "design") for file in (root / folder).glob("*.md"))
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in files if file.stem != "index"}


def _entries() -> dict[str, str]:
    pages = _pages()
    # Without the pages (files copied by hand), an error still has its message.
    text = pages[_MESSAGES].read_text(encoding="utf-8") if _MESSAGES in pages else ""
    return {slug: body.strip() for slug, body in _ENTRY.findall(text)}


def _with_commands(text: str, page: str, pages: dict[str, Path]) -> str:
    """Links between pages as the commands that print them; pictures are left out."""

    def command(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if picture:
            return ""
        if "://" in target:
            return found[0]
        path, _, anchor = target.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)).removesuffix(".md") if path else page
        name = anchor if name == _MESSAGES and anchor else name
        return f"{label} (`shadowrun explain {name}`)" if name in pages or name == anchor else label

    return _LINK.sub(command, text)


FORMAT = 1
"""Version of the JSON's form."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An operator, a message or page, or a run and a call."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="NAME | [DATA] CALL",
        help="an operator, a message or a page of the documentation; or a data file "
        f"(default: {options.DATA_FILE}) and the number of a call in its report",
    )
    parser.add_argument("--finding", metavar="N", type=int, help="number of a finding in the report, instead of a call")
    parser.add_argument("--list", action="store_true", help="list all messages and pages of the documentation")
    parser.add_argument("--page", action="store_true", help="write the page of all operators, in Markdown")
    parser.add_argument("--target", metavar="T", help="the run's target, if the file alone may not start it")
    parser.add_argument("--ref", metavar="R", help="the run's reference, if the file alone may not start it")
    options.add_output_arguments(parser)
    options.add_known_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation; returns the exit status."""
    if args.page:
        from shadowrun.judge.describe_facts import page

        print(page(), end="")
        return 0
    options.check_outputs(args.output)
    options.print_report(_document(args), args)
    return 0


def _document(args: argparse.Namespace) -> Document:
    words = list(args.what)
    if args.list:
        return _of_documentation()
    if len(words) == 1 and args.finding is None and not words[0].isdecimal():
        text = find_page(words[0])
        return _of_operator(words[0]) if text is None else _of_text(text)
    n_calls = int(args.finding is None)  # words that name a call; one more may name the data file
    if not n_calls <= len(words) <= n_calls + 1:
        raise UsageError(
            "Name an operator, a message or a call: `shadowrun explain aten::mm`, `shadowrun explain unknown-device`, "
            "`shadowrun explain DATA 578`, or `shadowrun explain DATA --finding 3`.",
            slug="bad-option",
        )
    args.data = words[0] if len(words) > n_calls else options.DATA_FILE
    return _of_call(args, words[-1] if n_calls else "")


# -- the documentation -------------------------------------------------------------------------------


def _of_text(text: Text) -> Document:
    from shadowrun.report.document import Document, Prose, Records

    data = {"format": FORMAT, "name": text.name, "text": text.body}
    blocks = (Prose(tuple(text.body.splitlines())),)
    return Document(text.name, blocks, data, Records(("name", "text"), ((text.name, text.body),)))


def _of_documentation() -> Document:
    from shadowrun.report.document import Document, Listing, Records, Section

    messages, pages = page_names()
    sections = [Section(title, (Listing(tuple(names)),)) for title, names in (("Messages", messages), ("Pages", pages))]
    rows = tuple((kind, name) for kind, names in (("message", messages), ("page", pages)) for name in names)
    data = {"format": FORMAT, "messages": messages, "pages": pages}
    return Document("documentation", tuple(sections), data, Records(("kind", "name"), rows))


# -- an operator -------------------------------------------------------------------------------------


def _of_operator(given: str) -> Document:
    from shadowrun.judge.describe_facts import describe
    from shadowrun.operators.fact_table import ROWS
    from shadowrun.operators.facts import facts
    from shadowrun.report.document import Document, Fact, Facts, Note, Records
    from shadowrun.schedule.selection import why_unknown

    op = given if "::" in given else f"aten::{given}"
    why = why_unknown(op)
    if why:
        raise UsageError(f"{op!r}: {why}.", slug="unknown-operator")
    row = facts(op)
    # The same texts as on the page of the documentation, so that both agree.
    known = [
        *describe(row),
        *(("calls are", f"{how}: {', '.join(names)}", "") for how, names in _treatments(op).items()),
    ]
    has_row = any(name in ROWS for name in (row.name, op.rpartition("::")[2].partition(".")[0]))
    lines = Facts(tuple(Fact(label, f"{text} (source: {source})" if source else text) for label, text, source in known))
    note = (
        () if has_row else (Note("no row in the operator table: defaults, and facts that follow from the name", "dim"),)
    )
    names = ("fact", "text", "source")
    listed = [dict(zip(names, fact, strict=True)) for fact in known]
    data = {"format": FORMAT, "op": op, "has_row": has_row, "facts": listed}
    return Document(f"facts on {op}", (*note, lines), data, Records(names, tuple(known)))


def _treatments(op: str) -> dict[str, list[str]]:
    """How the calls of an operator's overloads are treated."""
    from shadowrun.intercept import torch_operators
    from shadowrun.intercept.plan import Action, make_plan
    from shadowrun.intercept.untrusted.op_allowlist import operator_named

    words = {
        Action.REPLAY: "replayed and compared",
        Action.VIEW: "views: only the form is compared",
        Action.RANDOM: "random: replayed from the same state, or checked for plausibility",
        Action.EMPTY: "without defined values: only the form is compared",
        Action.PASS: "not replayed",
    }
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(torch_operators.operator_names()):
        if name == op or name.startswith(f"{op}."):
            try:
                plan = make_plan(operator_named(name, checked=False), 0)
            except (AttributeError, RuntimeError):  # TorchScript's own: Python has no such overload
                continue
            treatment = words[plan.action]
            # A comparison sees the operators that it is decomposed into, never the composite one.
            if plan.composite and plan.action is Action.REPLAY:
                treatment = "decomposed into other operators, which are compared"
            found[treatment].append(name)
    return dict(found)


# -- a call ------------------------------------------------------------------------------------------


def _of_call(args: argparse.Namespace, number: str) -> Document:
    import shadowrun
    from shadowrun.cli.commands.repro import named_platforms

    recorded = shadowrun.load(args.data, **options.known_options(args))
    call = _number(number) if number else _call_of_finding(recorded, args.finding)
    allow = named_platforms(args, recorded.info.target, recorded.info.ref)
    return _call_document(recorded.explain(call, allow=allow))


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:  # SQLite holds 63 bits
        raise UsageError(f"{text!r} is no number of a call: use one of the report.", slug="unknown-call")
    return int(text)


def _call_of_finding(recorded: Run, number: int) -> int:
    findings = {finding.number: finding for finding in (*recorded.findings(), *recorded.known().findings)}
    finding = findings.get(number)
    if finding is None:
        raise UsageError(f"There is no finding {number}: the run has {len(findings)}.", slug="unknown-finding")
    # A captured call can be judged again here; of the others only the recorded figures are shown.
    return next(seq for seq in (finding.captured, finding.worst_seq, finding.first_seq) if seq >= 0)


def _call_document(found: Explanation) -> Document:
    from shadowrun.judge.decision_trace import deciding
    from shadowrun.report.document import Document, Facts, Note, Records
    from shadowrun.report.formatting import record_facts

    call, shown = found.record.call, sanitize(found.record)
    blocks: list[Block] = [Facts(record_facts(shown)), _steps("as recorded", sanitize(found.recorded))]
    if found.verdict is not None:
        again = ", ".join(filter(None, (found.verdict.status, found.verdict.cause, found.verdict.explanation)))
        blocks.append(_steps(f"judged again here: {again}", found.steps))
    if found.note:
        blocks.append(Note(found.note, "warn"))
    operator = shown.call.op.partition(".")[0]
    blocks.append(Note(f"`shadowrun explain {shlex.quote(operator)}` prints the facts on the operator.", "dim"))
    names = ("rung", "result", "figure", "limit", "outcome")
    parts = {"recorded": found.recorded, "judged_again": found.steps}
    data = {
        "format": FORMAT,
        "call": call.seq,
        "op": call.op,
        "status": found.record.verdict.status,
        "note": found.note,
        **{part: [dict(zip(names, _cells(step), strict=True)) for step in steps] for part, steps in parts.items()},
        "decided_by": {part: deciding(steps) for part, steps in parts.items()},
    }
    rows = tuple((part, *_cells(step)) for part, steps in parts.items() for step in steps)
    title = f"call {call.seq:,} of {shown.call.op}: {found.record.verdict.status}"
    return Document(title, tuple(blocks), data, Records(("from", *names), rows))


def _cells(step: Step) -> tuple[str, ...]:
    return str(step.rung), step.result, step.figure, step.limit, str(step.outcome or "")


def _steps(title: str, steps: Sequence[Step]) -> Section:
    from shadowrun.judge.decision_trace import deciding
    from shadowrun.report.document import Fact, Facts, Section

    rows = []
    for step in steps:
        limit = f" (limit {step.limit})" if step.limit else ""
        outcome = f" → {step.outcome}" if step.outcome is not None else ""
        result = f"{step.result}: " if step.result else ""
        rows.append(Fact(step.rung, f"{result}{step.figure}{limit}{outcome}"))
    rung = deciding(steps) or "no rung of the ladder: the call was not judged"
    return Section(title, (Facts((*rows, Fact("decided by", rung, "strong"))),))
