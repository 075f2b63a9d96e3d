"""What a run under one flaw should say, and what it said."""

from collections import Counter
from dataclasses import asdict, dataclass, field

from shadowrun import Cause, Phase, Status

WRONG = (Status.MISMATCH, Status.UNSUPPORTED, Status.FALLBACK, Status.ERROR)
QUESTIONS = ("found", "placed", "cause", "first", "quiet", "drift")


@dataclass
class Score:
    """The marks of one (flaw, program, mode).

    Attributes:
        shown: The program's results were not those of the clean device, bit for bit. Where they were, nothing that a
            user would look at was wrong.
        found: An operator of the flaw has a status that the catalogue allows.
        placed: And in the part of the training step that it belongs to.
        cause: All that is recorded as wrong on operators of the flaw has a right cause, and something is recorded.
        first: The first call that is recorded as wrong is one of an operator of the flaw.
        quiet: Nothing is found on other operators, and shadowrun itself failed nowhere.
        drift: Isolated: True. Drift: the same verdicts, no accumulated error before the first wrong call, and some
            from it on.
        notes: What is behind a False.
    """

    flaw: str
    program: str
    mode: str
    held_out: bool
    shown: bool = True
    found: bool = False
    placed: bool = False
    cause: bool = False
    first: bool = False
    quiet: bool = False
    drift: bool = True
    explanations: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)

    @property
    def perfect(self):
        return all(getattr(self, q) for q in QUESTIONS)

    @property
    def passed(self):
        """Whether there is nothing to look into: a flaw that did not show need not be found."""
        return self.perfect or (not self.shown and not self.found and self.quiet and self.drift)

    def as_json(self):
        return asdict(self)


def phase_of(op, previous):
    """Part of the step in which an operator must be, if its name shows it."""
    if "backward" in op:
        return Phase.BACKWARD
    return Phase.OPTIMIZER if op.startswith("aten::_foreach_addc") else previous


def has_turns(flaw):
    """Whether some calls are right under the flaw and others wrong, and a finding must be a wrong result.

    Any other flaw is in every run of a program in which it matters.
    """
    return Cause.NON_DETERMINISM in flaw.accepted and set(flaw.statuses) == {Status.MISMATCH}


def signature(records):
    """Verdicts in call order, for comparing two modes.

    A run of a target that is wrong at random has other figures each time, so only what is believed counts.
    """
    return [(r.call.op, r.verdict.status) for r in records]


def score(flaw, program, mode, run, isolated, *, shown):
    """Score a run; `isolated` has the signature of the run without drift."""
    s = Score(flaw.name, program.name, mode, program.held_out, shown)
    records, findings = list(run.records()), run.findings()
    causes = set(Cause) | {None} if flaw.cause is None else {flaw.cause, *flaw.accepted}
    on_flaw = [r for r in records if r.call.op in flaw.operators]
    hits = [r for r in on_flaw if r.verdict.status in flaw.statuses and r.verdict.cause in causes - {None}]
    if flaw.cause is None:
        hits = [r for r in on_flaw if r.verdict.status in flaw.statuses]
    slow = [f for f in findings if f.kind == "slow" and f.op in flaw.operators] if flaw.cause is Cause.SLOW else []
    wrong = [r for r in on_flaw if r.verdict.status in WRONG]
    s.found = bool(slow or hits or [r for r in wrong if r.verdict.status in flaw.statuses])
    misplaced = [r.call for r in hits if r.call.phase != phase_of(r.call.op, r.call.phase)]
    s.placed = s.found and not misplaced
    s.notes += [f"misplaced: {c.op} in {c.phase}" for c in misplaced[:2]]
    off = [r for r in wrong if r.verdict.status not in flaw.statuses or r.verdict.cause not in causes]
    s.cause = bool(hits or slow) and not off
    said = Counter(f"{r.call.op}: {r.verdict.status}, {r.verdict.cause}, {r.verdict.explanation}" for r in off)
    s.notes += [f"{n} x {text}" for text, n in said.most_common(3)]
    s.explanations = dict(Counter(r.verdict.explanation for r in hits))
    first = next((r for r in records if r.verdict.status in WRONG), None)
    s.first = s.found and (first is None or first.call.op in flaw.operators)
    others = [f for f in findings if f.op not in flaw.operators]
    own = run.internal_failures()
    s.quiet = not others and not own
    s.notes += [f"false: {f.kind} {f.op}, {f.cause}, {f.explanation}, {f.evidence}" for f in others]
    s.notes += [f"own failure: {n.op} {n.evidence}" for n in own]
    if mode == "drift":
        s.notes += _drift(flaw, records, isolated)
        s.drift = not any(n.startswith("drift") for n in s.notes)
    return s


def _has_changed(record):
    # Isolated differences that are no numbers (the sign of zero, a stride) leave no accumulated error.
    return any(d.max_abs > 0 or d.n_nan or d.n_inf for d in record.diffs)


def early_drift(records):
    """Accumulated error before any call had another result: the chain is wrong."""
    start = next((r.call.seq for r in records if _has_changed(r)), len(records))
    early = [r for r in records if r.call.seq < start and r.drift_abs > 0]
    if early:
        yield f"drift: {early[0].drift_abs:.3g} at {early[0].call.op} before the first difference"


def _drift(flaw, records, isolated):
    """What is wrong with the drift column and with its verdicts."""
    # Flaws that count calls or use random numbers have another result each time.
    steady = not {Cause.NON_DETERMINISM, Cause.RANDOMNESS, Cause.SLOW} & {flaw.cause, *flaw.accepted}
    if steady and signature(records) != isolated:
        yield "drift: other verdicts than without"
    yield from early_drift(records)
    # A product of other bits at another address (MKL) is no flaw: only those of the flaw must be seen in the chain.
    changes = [r for r in records if _has_changed(r) and r.call.op in flaw.operators]
    start = changes[0].call.seq if changes else len(records)
    measured = [r for r in records if r.call.seq >= start and r.drift_abs >= 0]
    if measured and changes and not any(r.drift_abs > 0 or r.drift_rel > 0 for r in measured):
        yield f"drift: none after {changes[0].call.op}"
