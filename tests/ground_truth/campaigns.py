"""Each planted flaw alone: does a campaign find it, after how many variants, and as how many root causes?

python -m tests.ground_truth.campaigns --zoo FILE [--n 20000] [--seed 0] [--flaw NAME,NAME] [--each 100] [--most 4000]
    [--kept DIR] [--minutes M]

First the variants run on the clean device: which operators each calls, and that nothing is found. Then, for each flaw,
those that call one of its operators run on the flawed device, in the order of their numbers, until it is found, but
`--most` at most; and `--each` more, for the number of root causes that a report would have for it, and for the oracles.
With `--kept`, what was run is kept in a folder of this user, and a later start goes on; `--minutes` ends a start.

At the end, the findings of all flaws are grouped together: root causes of two flaws must not become one.
"""

import argparse
import itertools
import json
import os
import pickle
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from shadowrun import sim
from shadowrun.studies.campaign.causes.root_causes import Seen, root_causes, signature
from shadowrun.studies.campaign.oracles import FIRED, ORACLES, from_mask
from shadowrun.studies.campaign.run_variants import TARGET, RunnerSettings, VariantRunner
from shadowrun.studies.campaign.variants.recipe_generator import Generator
from shadowrun.types import Status

_KINDS = {
    Status.MISMATCH: ("mismatch", "wrong form"),
    Status.UNSUPPORTED: ("unsupported operator", "unsupported dtype"),
    Status.ERROR: ("error",),
    Status.FALLBACK: ("silent fallback", "warned fallback"),
}
_PIECE = 1000
"""Variants that are kept together."""
_RIGHT = ("match",)
"""Statuses of flaws that change bits as a correct device may: an oracle that reports them is wrong."""


def programs(path):
    from shadowrun.studies.zoo.program import read_zoo

    return list(read_zoo(Path(path)).programs.values())


def isolated(run, numbers):
    """Results of `run` by number, from forked processes: one that dies costs the number in hand; its result is None."""
    numbers = list(numbers)
    while numbers:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            with os.fdopen(writer, "wb") as out:
                for number in numbers:
                    out.write(pickle.dumps(run(number)))
                    out.flush()
            os._exit(0)
        os.close(writer)
        done = 0
        try:
            with os.fdopen(reader, "rb") as results:
                for number in numbers:
                    try:
                        result = pickle.load(results)  # of the own child
                    except EOFError:
                        break
                    done += 1
                    yield number, result
        finally:
            os.kill(child, 9)  # where the caller has seen enough
            os.waitpid(child, 0)
        if done < len(numbers):
            yield numbers[done], None
        numbers = numbers[done + 1 :]


def kept(folder, name, make):
    """What `make` returns, from a file of an earlier start where there is one."""
    path = folder and Path(folder) / f"{name}.pickle"
    if path and path.exists():
        return pickle.loads(path.read_bytes())  # of the own earlier start
    made = make()
    if path:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(made))
    return made


def clean_piece(generator, runner, numbers):
    """Of each variant on the clean device: identity, status, operators, false findings, and what the oracles say."""
    began = time.monotonic()

    def run(i):
        variant = generator.variant(i)
        result = runner.run(variant)
        found = [f for f in result.findings if f.role == TARGET]
        return variant.identity(), result.status, frozenset(result.ops), found, result.oracles

    rows = [done or (str(i), "crash", frozenset(), [], -1) for i, done in isolated(run, numbers)]
    rate = len(rows) / (time.monotonic() - began) * 3600
    print(f"clean: variants {numbers[0]} to {numbers[-1]}, {rate:,.0f} an hour", flush=True)
    return rows


def clean_pass(rows):
    """Operators of each variant, false findings, statuses and masks of the oracles; equal variants count once."""
    identities, ops, false = set(), [], []
    masks, statuses = Counter(), Counter()
    for i, (identity, status, called, found, mask) in enumerate(rows):
        is_first = identity not in identities
        identities.add(identity)
        ops.append(called if is_first else frozenset())
        if is_first:
            statuses[status] += 1
            masks[mask] += 1
            if found:
                false.append((i, found))
    return ops, false, statuses, masks


def search(flaw, generator, runner, ops, known, each, most):
    """Variants until a flaw is found, root causes of `each` more, and what the oracles say; None if it is not found."""
    wanted, kinds = set(flaw.operators), {k for s in flaw.statuses for k in _KINDS.get(Status(s), ())}
    calling = [i for i, called in enumerate(ops) if called & wanted]
    found_at, n_run, n_more, seen, masks = None, 0, 0, [], Counter()
    with sim.flaws(flaw.name):
        for i, result in isolated(lambda i: runner.run(generator.variant(i)), calling):
            n_run += 1
            if result is None:
                continue
            masks[result.oracles] += 1
            # What the clean device shows as well is a fault of the CPU.
            new = [f for f in result.findings if f.role == TARGET and (i, f.op, f.kind, f.cause) not in known]
            seen += [Seen(i, 0, result.n_calls, f) for f in new]
            if found_at is None and any(f.op in wanted and f.kind in kinds for f in new):
                found_at = i + 1
            n_more += found_at is not None
            if n_more > each or (found_at is None and n_run >= most):
                break
    causes = [str(c.signature) for c in root_causes(seen, 1)]
    row = {"found at": found_at, "root causes": causes, "call it": len(calling), "run": n_run}
    return row, masks, seen


def mixed(by_flaw):
    """Root causes of all flaws together that have findings of more than one, where each alone has others."""
    owners = {}
    for flaw, seen in by_flaw.items():
        for one in seen:
            owners.setdefault(signature(one.finding), set()).add(flaw)
    for cause in root_causes([one for seen in by_flaw.values() for one in seen], 1):
        flaws = [owners[s] for s in (cause.signature, *cause.others)]
        if len(set().union(*flaws)) > len(max(flaws, key=len)):
            yield f"{cause.signature}: {'; '.join(sorted(set().union(*flaws)))}"


def oracle_table(clean, flawed):
    """Lines of false positives and false negatives of each oracle.

    Args:
        clean: Variants by mask of oracles on the clean device.
        flawed: The same for each flaw, by its statuses.
    """
    right, wrong = Counter(), Counter()
    for statuses, masks in flawed:
        if set(statuses) <= set(_RIGHT):
            right.update(masks)
        elif set(statuses) == {"mismatch"}:
            wrong.update(masks)
    yield f"{'oracle':14} {'clean':>16} {'other rounding':>16} {'missed':>16}"
    for name in ORACLES:
        rows = []
        for masks, is_fired, differs in ((clean, False, True), (right, True, True), (wrong, True, False)):
            of = Counter({m: n for m, n in masks.items() if m >= 0 and (not is_fired or FIRED in from_mask(m))})
            n = sum(count for m, count in of.items() if (name in from_mask(m)) is differs)
            rows.append(f"{n} of {of.total()}, {100 * n / max(of.total(), 1):.2f} %")
        yield f"{name:14} {rows[0]:>24} {rows[1]:>24} {rows[2]:>24}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", required=True)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--most", type=int, default=4000)
    parser.add_argument("--flaw", default="")
    parser.add_argument("--output", default="campaigns.json")
    parser.add_argument("--kept", default="")
    parser.add_argument("--minutes", type=float, default=1e9)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    ends = time.monotonic() + 60 * args.minutes
    generator = Generator(programs(args.zoo), args.seed)
    runner = VariantRunner(RunnerSettings(("sim",), flaws=()))
    pieces = []
    for start in range(0, args.n, _PIECE):
        numbers = range(start, min(start + _PIECE, args.n))
        pieces += kept(args.kept, f"clean-{start}", lambda: clean_piece(generator, runner, numbers))  # noqa: B023
        if time.monotonic() > ends:
            return 75
    ops, false, statuses, clean = clean_pass(pieces)
    print(f"clean device: {dict(statuses)}; {len(false)} with a finding", flush=True)
    for i, found in false:
        print(f"  {i}: {'; '.join(f'{f.kind} {f.op} {f.explanation}' for f in found)}", flush=True)
    known = {(i, f.op, f.kind, f.cause) for i, found in false for f in found}
    rows, masks, by_flaw = {}, [], {}
    for flaw in sim.CATALOGUE.values():
        if not any(word in flaw.name for word in args.flaw.split(",")):
            continue
        row, seen_masks, seen = kept(
            args.kept,
            flaw.name,
            lambda: search(flaw, generator, runner, ops, known, args.each, args.most),  # noqa: B023
        )
        # As the code groups them now: what is kept may be older.
        row["root causes"] = [str(c.signature) for c in root_causes(seen, 1)]
        masks.append((flaw.statuses, seen_masks))
        if not set(flaw.statuses) & {s.value for s in _KINDS}:
            print(f"{flaw.name:34} is none: {len(row['root causes'])} root causes in {row['run']} variants", flush=True)
            continue
        rows[flaw.name], by_flaw[flaw.name] = row, seen
        at = row["found at"] or "not found"
        print(
            f"{flaw.name:34} {at!s:>9}  {row['call it']:6} call it  {len(row['root causes'])} root causes", flush=True
        )
        text = {"clean": [i for i, _ in false], "flaws": rows}
        Path(args.output).write_text(json.dumps(text, indent=1))
        if time.monotonic() > ends:
            return 75
    at = sorted(row["found at"] for row in rows.values() if row["found at"])
    if at:
        print(f"{len(at)} of {len(rows)} flaws found; median {statistics.median(at):g} variants, worst {at[-1]}")
        one = sum(len(row["root causes"]) == 1 for row in rows.values() if row["found at"])
        print(f"{one} of {len(at)} as one root cause")
        print(*(mixed(by_flaw) if len(by_flaw) > 1 else ()), sep="\n")
    print(*itertools.chain(oracle_table(clean, masks)), sep="\n")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
