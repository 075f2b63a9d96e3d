"""Metamorphic relations alone: ``python -m tests.studies.campaign.relations --zoo FILE -n 400 [--flaws NAME …]``.

Without flaws: pairs that were compared on the platform, and violations, each of which is a false alarm or a true fault
of the platform. With flaws of `sim`: the number of variants until a relation finds each flaw.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

from shadowrun import sim
from shadowrun.platforms.device import resolve
from shadowrun.sim.catalogue import CATALOGUE
from shadowrun.studies.campaign.metamorphic import RELATIONS, Metamorphic
from shadowrun.studies.campaign.variants.recipe_generator import Generator
from shadowrun.studies.campaign.variants.tracing import Values, copied
from shadowrun.studies.zoo.graph import Runner
from tests.studies.campaign.validity import modules


def checked(generator, checker, numbers, seeds, relations=RELATIONS):
    """Number, relation, violations and number of pairs of each variant and relation."""
    for i in numbers:
        variant = generator.variant(i)
        graph, values = variant.graph, seeds.setdefault(variant.recipe.seed, Values(variant.recipe.seed))

        def program(graph=graph, values=values):
            return Runner(graph)([copied(values(described)) for described in graph.inputs])

        for relation in relations:
            try:
                found, n_pairs = checker.check(program, relation)
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
            yield i, relation, found, n_pairs, variant


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("-n", type=int, default=400, help="variants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--flaws", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    programs = [p for p in modules(args.zoo) if len(p.graph.nodes) <= 20]
    generator, seeds = Generator(programs, args.seed), {}
    start, pairs, alarms = time.process_time(), Counter(), Counter()
    if not args.flaws:
        for _, relation, found, n_pairs, variant in checked(
            generator, Metamorphic(resolve(args.platform)), range(args.n), seeds
        ):
            pairs[relation] += n_pairs
            for violation in found:
                alarms[relation] += 1
                print(violation, variant.recipe.to_json(), flush=True)
        spent = time.process_time() - start
        print(f"{args.n} variants, {sum(pairs.values())} pairs {dict(pairs)}, {sum(alarms.values())} violations")
        print(f"{spent / args.n / len(RELATIONS) * 1e3:.1f} ms of processor time a variant and relation")
        return
    sim.enable()
    for flaw in args.flaws:
        with sim.flaws(flaw):
            for i, relation, found, _, _ in checked(generator, Metamorphic(resolve("sim")), range(args.n), seeds):
                # True faults of the CPU, which `sim` has as well, are no sign of the flaw.
                mine = [v for v in found if v.op.startswith(CATALOGUE[flaw].operators)]
                if mine:
                    print(f"{flaw}: variant {i}, {relation}: {mine[0].op} {mine[0].message[:90]}", flush=True)
                    break
            else:
                print(f"{flaw}: not found by {args.n} variants", flush=True)


if __name__ == "__main__":
    main()
