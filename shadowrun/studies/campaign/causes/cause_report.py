"""What `campaign repro` leaves of a root cause: ``cause.json`` in a folder of its own, and its page."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis.wording import plural
from shadowrun.report.document import Document, Fact, Facts, Listing, Note, Records, Section
from shadowrun.store.atomic_write import write_text
from shadowrun.store.codec import decode_facts
from shadowrun.studies.campaign.causes.root_causes import published_cause
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shadowrun.report.document import Block
    from shadowrun.studies.campaign.causes.root_causes import RootCause, Signature
    from shadowrun.studies.campaign.summary import Summary

__all__ = [
    "SCRIPTS",
    "CauseFile",
    "cause_data",
    "cause_document",
    "folder_name",
    "other_forms",
    "read_causes",
    "target_name",
    "write_cause",
]

# What `campaign repro` leaves of a root cause, ``cause.json`` in a folder of its own, and the report reads.
#
# The folder may come from anyone: texts are bounded, and the report cleans them.

SCRIPTS: Final = "scripts"
"""Folder in that of the campaign."""
_NAME: Final = "cause.json"
# Folders may come from another machine: how many are read, and how much of each, is bounded.
_MAX_BYTES: Final = 1 << 16
_MAX_FOLDERS: Final = 10_000
_MAX_STEM: Final = 80


@dataclass(frozen=True, slots=True)
class CauseFile:
    """A root cause, minimised.

    Attributes:
        signature: Its text.
        recipe: The variant with the fewest mutations, as JSON.
        n_mutations: Mutations of the variant in which it was found.
        text: The short script; empty without one.
        inputs: Inputs of the long script, in words; empty without one.
        script: That script, below the folder of the root cause.
        exits: Exit status of the long script on the machine that wrote it; -1 where it cannot say, or there is none.
        said: What it printed.
        notes: Why there is no script, and what else a reader should know.
    """

    signature: str
    recipe: str
    n_mutations: int = 0
    text: str = ""
    inputs: str = ""
    script: str = ""
    exits: int = -1
    said: str = ""
    notes: tuple[str, ...] = ()


def folder_name(signature: Signature) -> str:
    """The folder of a root cause: it stays the same while a campaign grows, and its number does not."""
    digest = hashlib.blake2b(str(signature).encode(), digest_size=3).hexdigest()
    # A signature may come from a file of anyone, and becomes a path: no separator, no colon, and an end to its length.
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{signature.op or 'program'}-{signature.kind}")[:_MAX_STEM]
    return f"{stem}-{digest}"


def write_cause(folder: Path, cause: CauseFile) -> None:
    """Write it into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / _NAME, json.dumps(dataclasses.asdict(cause), indent=1) + "\n")


def read_causes(scripts: Path) -> dict[str, CauseFile]:
    """All that is there, by signature; what cannot be read is left out, since `campaign repro` makes it again."""
    found: dict[str, CauseFile] = {}
    folders = sorted(scripts.iterdir())[:_MAX_FOLDERS] if scripts.is_dir() and not scripts.is_symlink() else []
    for folder in folders:
        path = folder / _NAME
        try:
            if path.is_file() and not (path.is_symlink() or folder.is_symlink()) and path.stat().st_size <= _MAX_BYTES:
                cause = decode_facts(CauseFile, path.read_text(encoding="utf-8"))
                found[cause.signature] = cause
        except (OSError, ValueError, RecursionError):
            continue
    return found


FORMAT: Final = 1
_MAX_OTHERS: Final = 6
# What a verdict says of an operator, for a title.
_WHAT: Final[dict[str, str]] = {
    Kind.MISMATCH: "returns wrong values",
    Kind.FORM: "returns another dtype, shape or layout",
    Kind.ERROR: "raises",
    Kind.UNSUPPORTED: "is not supported",
    Kind.UNSUPPORTED_DTYPE: "does not support the dtype",
    Kind.CRASH: "ends the process",
    Kind.TIMEOUT: "does not return",
    Kind.OUT_OF_MEMORY: "takes all memory",
    Kind.REFERENCE: "is wrong on the reference, and right",
    Kind.SILENT_FALLBACK: "runs on the CPU, without a warning,",
    Kind.WARNED_FALLBACK: "runs on the CPU",
}


def cause_document(number: int, cause: RootCause, summary: Summary) -> Document:
    """A root cause, ready to be pasted as an issue.

    Args:
        number: Its number in the report.
        cause: The root cause.
        summary: The campaign.
    """
    s = cause.signature
    where = ", ".join(target_name(summary, t) for t in cause.targets)
    why = ", ".join(filter(None, (s.cause, *cause.explanations[:1])))
    title = f"{s.op or 'A program'} {_WHAT.get(s.kind, s.kind)} on {where}{f': {why}' if why else ''}"
    made = summary.scripts.get(str(s))
    records = Records(("key", "value"), tuple((k, str(v)) for k, v in cause_data(number, cause, summary).items()))
    return Document(
        title,
        tuple(_blocks(number, cause, summary, made)),
        {"format": FORMAT, **cause_data(number, cause, summary)},
        records,
    )


def _blocks(number: int, cause: RootCause, summary: Summary, made: CauseFile | None) -> Iterator[Block]:
    s, f = cause.signature, cause.smallest.finding
    facts = [Fact("operator", s.op or "the program as a whole"), Fact("verdict", s.kind)]
    if s.dtype or f.dtype:
        facts.append(Fact("dtype", f"{f.dtype or s.dtype}{f' ({s.dtype})' if f.dtype and s.dtype else ''}"))
    if cause.others:
        facts.append(Fact("also as", other_forms(cause)))
    if s.cause:
        # Beside ours, so that figures can be held against the published study, which has three causes.
        facts.append(Fact("cause", f"{s.cause} (published: {published_cause(s.cause)})"))
    if s.raised:
        facts.append(Fact("exception", s.raised))
    facts += [Fact("explanation", text) for text in cause.explanations[:3] if text != s.raised]
    if f.message:
        facts.append(Fact("evidence", f.message))
    facts.append(Fact("where", ", ".join(target_name(summary, t) for t in cause.targets)))
    facts.append(Fact("kind", "flaw of the framework" if cause.is_framework else "platform issue"))
    if reason := summary.known.get(str(s)):
        facts.append(Fact("known", reason))
    yield Facts(tuple(facts))
    if made is not None and made.text:
        blocks: list[Block] = [Listing(tuple(made.text.rstrip().splitlines()), "python")]
        if "INPUTS" in made.text:
            blocks.append(
                Note("inputs.pt lies next to the script; its tensors are too large or too irregular to print.")
            )
        yield Section("Script", tuple(blocks), "Plain torch." if "shadowrun" not in made.text else "")
    # The output is that of the long script, which checks itself: an issue needs what was seen, not what was expected.
    if made is not None and made.said:
        shown = {1: "It exits 1: the fault is there.", 0: "It exits 0 here."}.get(made.exits, "")
        yield Section(
            "Result",
            (Listing(tuple(made.said.splitlines()), "console"),),
            f"What the script that checks itself prints. {shown}".rstrip(),
        )
    if made is None:
        yield Note(f"`shadowrun campaign repro DIR {number}` writes a script.", "dim")
    else:
        yield from (Note(note, "dim") for note in made.notes)
    yield Section("Versions", (Facts(tuple(Fact(k, v) for k, v in summary.versions.items())),))
    yield Section("Seen", (Facts(tuple(_seen(number, cause, summary, made))),))


def _seen(number: int, cause: RootCause, summary: Summary, made: CauseFile | None) -> Iterator[Fact]:
    yield Fact("campaign", f"{summary.title}, {plural(summary.n_variants, 'variant')}")
    yield Fact("root cause", f"number {number}, in {plural(cause.n_variants, 'variant')}")
    yield Fact("first", f"variant {cause.first}")
    yield Fact("smallest", f"variant {cause.smallest.number}, {plural(cause.smallest.size, 'call')}")
    if recipe := summary.recipes.get(cause.smallest.number):
        # As a word of a shell, to which it is copied: the text may be anyone's.
        yield Fact("recipe", shlex.quote(recipe), command=True)
    if made is not None and made.recipe and made.recipe != recipe:
        yield Fact("minimised", shlex.quote(made.recipe), command=True)


def cause_data(number: int, cause: RootCause, summary: Summary) -> dict[str, Any]:
    """A root cause as plain values."""
    s, f = cause.signature, cause.smallest.finding
    made = summary.scripts.get(str(s))
    return {
        "number": number,
        "signature": str(s),
        "op": s.op,
        "kind": s.kind,
        "dtype": s.dtype,
        "cause": s.cause,
        "published_cause": published_cause(s.cause),
        "raised": s.raised,
        "others": [str(other) for other in cause.others],
        "explanations": list(cause.explanations),
        "evidence": f.message,
        "targets": [target_name(summary, t) for t in cause.targets],
        "is_framework": cause.is_framework,
        "n_variants": cause.n_variants,
        "first": cause.first,
        "smallest": cause.smallest.number,
        "n_calls": cause.smallest.size,
        "recipe": summary.recipes.get(cause.smallest.number),
        "is_new": None if summary.new is None else str(s) in summary.new,
        "known": summary.known.get(str(s)),
        "script": made.text if made is not None else None,
        "output": made.said if made is not None else None,
        "minimised": made.recipe if made is not None else None,
        "notes": list(made.notes) if made is not None else [],
    }


def other_forms(cause: RootCause) -> str:
    """The other forms of its operator: ``aten::mul_.Tensor float; aten::mul.Scalar complex``."""
    shown = [f"{s.op} {s.dtype}".strip() for s in cause.others]
    return "; ".join(shown[:_MAX_OTHERS]) + (f"; {len(shown) - _MAX_OTHERS} more" if len(shown) > _MAX_OTHERS else "")


def target_name(summary: Summary, target: int) -> str:
    """Name of a target."""
    return summary.platforms[target].name if 0 <= target < len(summary.platforms) else "the reference itself"
