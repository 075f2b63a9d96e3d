"""What runs on platforms whose numerics really differ: the benchmark's programs, and one operator at a time."""

import collections
import contextlib
import fnmatch
import warnings
from dataclasses import dataclass
from unittest import mock

import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.intercept.torch_operators import unwrapped
from shadowrun.platforms.device import resolve
from tests.ground_truth import kit, layouts
from tests.ground_truth.benchmark import quietly
from tests.ground_truth.programs import PROGRAMS
from tests.transparency import test_other_numerics as table

KNOWN_BUGS = {
    ("aten::pixel_shuffle", "lazy", "implementation"): "returns uninitialised memory",
    ("aten::pixel_shuffle", "lazy", "non-determinism"): "returns uninitialised memory",
    ("aten::native_batch_norm", "lazy", "implementation"): "running statistics are not written",
    ("aten::_euclidean_dist", "lazy", "missing operator"): "cdist calls as_strided, which the device lacks",
    ("aten::cosh", "cpu", "reference"): "the CPU's vector kernel overflows early: cosh(89) is 2.2e38",
    ("aten::sinh", "cpu", "reference"): "the CPU's vector kernel overflows early: sinh(89) is 2.2e38",
}
"""True bugs by operator, device and cause; `tests/ground_truth/test_real_platforms.py` shows them without shadowrun."""

LEFT_THE_DEVICE = "is not a lazy tensor"
"""How `lazy` complains of what its own fallbacks made: views with several results stay on the CPU."""

WRONG = (Status.MISMATCH, Status.ERROR, Status.UNSUPPORTED)


@dataclass(frozen=True)
class Case:
    """A program of the benchmark, or one operator forward and backward."""

    name: str
    operator: bool = False

    def __call__(self, device="cpu"):
        if not self.operator:
            return PROGRAMS[self.name](device)
        torch.manual_seed(0)
        out = table.OPERATORS[self.name.removeprefix("operator ")]()
        return (out.real.float() if out.is_complex() else out.float()).square().sum().backward()


def cases(every=1, wanted="*"):
    """All cases of a name: with `every`, each family still has a program."""
    chosen = [Case(p.name) for p in PROGRAMS.values() if p.number % every == 0]
    chosen += [Case(f"operator {name}", operator=True) for name in list(table.OPERATORS)[::every]]
    return [case for case in chosen if fnmatch.fnmatch(case.name, wanted)]


@contextlib.contextmanager
def images_in_channels_last():
    """Models and 4-dimensional inputs of programs and operators lie in memory as NHWC."""
    randn, train, rand = kit.Kit.randn, kit.Kit.train, table.rand

    def laid_out(make):
        def wrapped(*args, **kwargs):
            made = make(*args, **kwargs)
            return layouts.channels_last(made) if made.dim() == 4 else made

        return wrapped

    def trained(self, model, *args, **kwargs):
        return train(self, model.to(memory_format=torch.channels_last), *args, **kwargs)

    with (
        mock.patch.object(kit.Kit, "randn", laid_out(randn)),
        mock.patch.object(kit.Kit, "train", trained),
        mock.patch.object(table, "rand", laid_out(rand)),
    ):
        yield


def run_cases(setup, batch, begin):
    """Run cases under one comparison, whose start costs more than most of them, and give their rows.

    Args:
        setup: What is compared.
        batch: The cases.
        begin: Called with each before it runs.
    """
    layout = images_in_channels_last() if setup.channels_last else contextlib.nullcontext()
    raised, notes = {}, []
    if setup.on_target:
        resolve(setup.target)  # programs run there before anything is compared
    plain = {case.name: plainly(case, setup.target) for case in batch} if setup.on_target else {}
    changed = set()
    with layout, quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = layouts.ChannelsLast() if setup.contiguous else shadowrun.compare(
            setup.target, ref=setup.ref, drift=setup.drift
        )  # fmt: skip
        with run:
            for case in batch:
                begin(case)
                try:
                    if setup.on_target:
                        results = read(case(setup.target))
                        if plain[case.name] is not None and not kit.same(results, plain[case.name]):
                            changed.add(case.name)
                    else:
                        case()
                except Exception as error:
                    raised[case.name] = _words(error)
                run.step()
        by_step = collections.defaultdict(list)
        for r in run.records():
            by_step[r.call.step].append(r)
        if not setup.contiguous:
            notes = [_note(n.op, "own failure", "", "", n.evidence, setup) for n in run.internal_failures()]
    for step, case in enumerate(batch):
        row = {"case": case.name} | tally(by_step[step], setup)
        if case.name in raised:
            row["raised"] = raised[case.name]
        row["found"] += notes
        notes = []
        if setup.on_target:
            row["repeatable"] = plain[case.name] is not None
            for note in row["found"] if plain[case.name] == [raised.get(case.name)] else ():
                if note["status"] == "error" and not note["known"]:
                    note["known"] = "a plain run raises it too"
        # Uninitialised memory may be the same in two plain runs by chance.
        if case.name in changed and not any(f["op"] == "aten::pixel_shuffle" for f in row["found"]):
            row["found"].append(
                _note("", "changed", "", "the program's results are not those of a plain run", "", setup)
            )
        yield row


def read(results):
    """A program's results on the CPU."""
    # What a device of this kind gives may be wrapped on the CPU too, and a wrapper's memory is none.
    return [unwrapped(r.detach().cpu()) if isinstance(r, torch.Tensor) else r for r in results]


def plainly(case, device):
    """Results of a program without a comparison; None where two runs of it differ, its error where it does not run."""
    try:
        first, second = (read(case(device)) for _ in range(2))
    except Exception as error:
        return [_words(error)]
    return first if kit.same(first, second) else None


def _words(error):
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def tally(records, setup):
    """Figures of one run: what was equal, what was rounding and how far off, and what was called wrong."""
    rounding = [r for r in records if r.verdict.status is Status.MATCH and r.verdict.cause is not None]
    operators = collections.defaultdict(lambda: {"ulp": 0, "units": 0.0})
    for r in rounding:
        figures = operators[r.call.op]
        figures["ulp"] = max([figures["ulp"], *(d.max_ulp for d in r.diffs)])
        figures["units"] = max([figures["units"], *(d.excess_actual for d in r.diffs)])
    reasons = collections.Counter(r.verdict.explanation for r in records if r.verdict.status is Status.UNVERIFIED)
    found = [
        _note(r.call.op, str(r.verdict.status), str(r.verdict.cause or ""), r.verdict.explanation,
              f"{r.call.inputs}: {r.verdict.evidence}", setup)
        for r in records
        if r.verdict.status in WRONG or r.verdict.cause is Cause.NON_DETERMINISM
    ]  # fmt: skip
    return {
        "calls": len(records),
        "equal": sum(r.verdict.status is Status.MATCH and r.verdict.cause is None for r in records),
        "rounding": len(rounding),
        "operators": dict(operators),
        "unverified": dict(reasons),
        "counts": dict(collections.Counter(str(r.verdict.status) for r in records)),
        "found": found,
    }


def _note(op, status, cause, explanation, evidence, setup):
    device = setup.target.partition("[")[0]
    known = KNOWN_BUGS.get((op, device, cause), "")
    if setup.target == "cpu" and cause == "exceptional values":  # what is the reference in other rows is the target
        known = known or KNOWN_BUGS.get((op, device, "reference"), "")
    if device == "lazy" and status == "error" and LEFT_THE_DEVICE in evidence:
        known = "an input was made by unbind or split, which fall back and leave their results on the CPU"
    return {
        "op": op, "status": status, "cause": cause, "explanation": explanation, "evidence": evidence[:300],
        "known": known,
    }  # fmt: skip
