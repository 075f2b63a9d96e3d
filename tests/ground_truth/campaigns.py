"""Each planted flaw alone: does a campaign find it, after how many variants, and as how many root causes?

python -m tests.ground_truth.campaigns [--zoo FILE] [--n 20000] [--seed 0] [--flaw NAME] [--each 300] [--output FILE]

First the variants run on the clean device: which operators each calls, and that nothing is found. Then, for each flaw,
those that call one of its operators run on the flawed device, in the order of their numbers, until it is found; and
`--each` more, for the number of root causes that the report would have for it.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

from shadowrun import sim
from shadowrun.studies.campaign.findings import Seen, root_causes
from shadowrun.studies.campaign.generate import Generator
from shadowrun.studies.campaign.runner import RunnerSettings, VariantRunner
from shadowrun.types import Status

_KINDS = {
    Status.MISMATCH: ("mismatch", "wrong form"),
    Status.UNSUPPORTED: ("unsupported operator", "unsupported dtype"),
    Status.ERROR: ("error",),
    Status.FALLBACK: ("silent fallback", "warned fallback"),
}


def programs(path):
    from shadowrun.studies.zoo.program import read_zoo

    return list(read_zoo(Path(path)).programs.values())


def clean_pass(generator, runner, n):
    """Operators of each variant on the clean device, and its false findings."""
    ops, false, invalid, began, seen = [], [], 0, time.process_time(), set()
    for i in range(n):
        variant = generator.variant(i)
        identity = variant.identity()
        if identity in seen:
            ops.append(frozenset())
            continue
        seen.add(identity)
        result = runner.run(variant)
        ops.append(frozenset(result.ops))
        invalid += result.status == "invalid"
        if result.findings or result.status not in ("ok", "invalid", "unverified"):
            false.append((i, result.findings))
        if i % 1000 == 999:
            rate = (i + 1) / (time.process_time() - began) * 3600
            print(f"clean: {i + 1} variants, {len(false)} false, {invalid} invalid, {rate:,.0f} an hour", flush=True)
    return ops, false, invalid


def search(flaw, generator, runner, ops, each):
    """Number of variants until a flaw is found, and the root causes of `each` more; None if it is not found."""
    wanted, kinds = set(flaw.operators), {k for s in flaw.statuses for k in _KINDS.get(Status(s), ())}
    found_at, n_more, seen = None, 0, []
    with sim.flaws(flaw.name):
        for i, called in enumerate(ops):
            if not called & wanted:
                continue
            result = runner.run(generator.variant(i))
            seen += [Seen(i, 0, result.n_calls, f) for f in result.findings]
            if found_at is None and any(f.op in wanted and f.kind in kinds for f in result.findings):
                found_at = i + 1
            n_more += found_at is not None
            if n_more > each:
                break
    causes = root_causes(seen, 1)
    return found_at, [str(c.signature) for c in causes], sum(bool(c & wanted) for c in ops)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", default=".shadowzoo")
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=300)
    parser.add_argument("--flaw", default="")
    parser.add_argument("--output", default="campaigns.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    generator = Generator(programs(args.zoo), args.seed)
    runner = VariantRunner(RunnerSettings(("sim",), flaws=()))
    ops, false, invalid = clean_pass(generator, runner, args.n)
    print(f"clean device: {len(false)} false findings in {args.n} variants, {invalid} invalid")
    rows = {}
    for flaw in sim.CATALOGUE.values():
        if args.flaw not in flaw.name or not set(flaw.statuses) & {s.value for s in _KINDS}:
            continue
        found_at, causes, n_calling = search(flaw, generator, runner, ops, args.each)
        rows[flaw.name] = {"found at": found_at, "root causes": causes, "variants that call it": n_calling}
        print(
            f"{flaw.name:34} {found_at or 'not found'!s:>9}  {n_calling:6} call it  {len(causes)} root causes",
            flush=True,
        )
        Path(args.output).write_text(json.dumps({"clean": [f[0] for f in false], "flaws": rows}, indent=1))
    at = sorted(row["found at"] for row in rows.values() if row["found at"])
    if at:
        print(f"{len(at)} of {len(rows)} flaws found; median {statistics.median(at):g} variants, worst {at[-1]}")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
