"""Variants that run on the reference, by mutator: ``python -m tests.studies.campaign.validity --zoo FILE -n 20000``.

Each variant is run from scratch on the CPU, with the values of its own seed. Columns: variants that have the mutator;
those that ran (%); choices of the mutator that the generator refused (%), because the reference would not have run them
or nothing finite was left; variants without exceptional values whose results are nowhere finite (%).
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from shadowrun.studies.campaign.mutators import ALL, MUTATORS
from shadowrun.studies.campaign.variants.recipe_generator import Generator
from shadowrun.studies.campaign.variants.tracing import Invalid, Values
from shadowrun.studies.campaign.variants.variant import build, run
from shadowrun.studies.zoo.program import program_of, read_zoo
from tests.studies.campaign.programs import PROGRAMS


def modules(path):
    """Programs of torch's module database, kept in a file."""
    from shadowrun.studies.zoo.program import unique, write_zoo
    from shadowrun.studies.zoo.sources.modules import collect

    if not path.exists():
        found = collect(lambda _: True, lambda *_: None)
        write_zoo(path, unique(found.programs)[0], found.stages)
    return list(read_zoo(path).programs.values())


def finite_somewhere(results):
    floats = [
        t for t in results if isinstance(t, torch.Tensor) and t.numel() and (t.is_floating_point() or t.is_complex())
    ]
    return not floats or any(bool(t.isfinite().any()) for t in floats)


def measure(generator, numbers, by_seed):
    """Counts of variants, by mutator and as a whole; microseconds of processor time."""
    counts, whole, seen, reasons = Counter(), Counter(), set(), Counter()
    for i in numbers:
        start = time.process_time()
        variant = generator.variant(i)
        whole["make_us"] += round((time.process_time() - start) * 1e6)
        start = time.process_time()
        identity = variant.identity()
        whole["identity_us"] += round((time.process_time() - start) * 1e6)
        names = {m.name for m in variant.recipe.mutations}
        counts.update((name, "n") for name in names)
        whole.update(n=1, calls=len(variant.graph.nodes), bytes=len(json.dumps(variant.recipe.to_json())))
        whole["small"] += len(variant.graph.nodes) <= 20
        if identity in seen:
            whole["duplicates"] += 1
            continue
        seen.add(identity)
        whole["distinct"] += 1
        try:
            results = run(variant.graph, variant.execution, by_seed(variant.recipe.seed))
        except Invalid as reason:
            whole["invalid"] += 1
            counts.update((name, "invalid") for name in names)
            reasons[str(reason)[:100]] += 1
            continue
        if not any(MUTATORS[name].exceptional for name in names):
            whole["judged"] += 1
            counts.update((name, "judged") for name in names)
            if not finite_somewhere(results):
                whole["nowhere"] += 1
                counts.update((name, "nowhere") for name in names)
    return counts, whole, reasons


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", type=Path, help="zoo; programs of torch's module database are written there if absent")
    parser.add_argument("-n", type=int, default=20_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-calls", type=int, default=20, help="programs with at most so many calls")
    parser.add_argument("--mutators", nargs="*", default=ALL)
    args = parser.parse_args()
    torch.set_num_threads(1)
    programs = modules(args.zoo) if args.zoo else [program_of(p.id, "tests", p.graph) for p in PROGRAMS]
    programs = [p for p in programs if len(p.graph.nodes) <= args.max_calls]
    generator, seeds = Generator(programs, args.seed, args.mutators), {}
    counts, whole, reasons = measure(
        generator, range(args.start, args.start + args.n), lambda seed: seeds.setdefault(seed, Values(seed))
    )
    n, distinct = whole["n"], whole["distinct"]
    sample = [generator.recipe(i) for i in range(args.start, args.start + min(args.n, 2000))]
    start = time.process_time()
    for recipe in sample:
        build(recipe, generator.library)
    build_us = (time.process_time() - start) / len(sample) * 1e6
    print(
        f"{len(programs)} programs; {n} variants of {whole['calls'] / n:.1f} calls, {whole['small'] / n:.1%} of <= 20"
    )
    print(f"duplicates {whole['duplicates'] / n:.2%}; ran {1 - whole['invalid'] / distinct:.3%} of {distinct}")
    print(f"nowhere finite {whole['nowhere'] / whole['judged']:.2%} of {whole['judged']} without exceptional values")
    print(f"{whole['make_us'] / n:.0f} us a recipe and its graph, {build_us:.0f} us a build alone")
    print(f"{whole['identity_us'] / n:.0f} us an identity, {whole['bytes'] / n:.0f} bytes a recipe")
    print(f"{'mutator':14} {'variants':>8} {'ran %':>8} {'choices':>8} {'refused %':>9} {'nowhere finite %':>16}")
    for name in sorted(generator.tried, key=lambda m: (MUTATORS[m].family, m)):
        has, judged = counts[name, "n"], counts[name, "judged"]
        row = 100 * (1 - counts[name, "invalid"] / max(has, 1)), generator.tried[name]
        share = 100 * counts[name, "nowhere"] / max(judged, 1)
        print(f"{name:14} {has:8} {row[0]:8.2f} {row[1]:8} {100 * generator.refused[name] / row[1]:9.1f} {share:16.2f}")
    for reason, k in reasons.most_common(12):
        print(f"{k:6} {reason}")


if __name__ == "__main__":
    main()
