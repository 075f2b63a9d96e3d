"""Platforms whose numerics really differ and are right: every difference is rounding, and no finding is false.

python -m tests.ground_truth.real_platforms [--platform PATTERN] [--every N] [--case PATTERN] [--output FILE] [--fresh]

All programs of the benchmark and the operators of `tests.transparency.test_other_numerics` run on each platform, the
programs on `lazy` itself too: there their results must be those of a plain run, where such runs agree. Rows
are kept in FILE.rows as they come: a run that was stopped goes on where it was, unless `--fresh`.
"""

import argparse
import collections
import fnmatch
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.ground_truth.real_cases import cases, run_cases

BATCH = 12
PLAINEST = "cpu[isa=default,mkl_cbwr=COMPATIBLE,onednn_isa=SSE41,threads=1]"


@dataclass(frozen=True)
class Setup:
    """What is compared: a target with a reference, on programs in a layout."""

    target: str
    ref: str = "cpu"
    channels_last: bool = False
    drift: bool = False
    contiguous: bool = False
    """No two platforms: each operator in channels-last against itself in the contiguous layout."""
    on_target: bool = False
    """Programs run on the target itself, and must not notice: their results are those of a plain run, bit by bit."""

    def cases(self, every, wanted):
        """What runs under this setup: single operators are made on the CPU."""
        return [case for case in cases(every, wanted) if not (self.on_target and case.operator)]


_CPUS = (
    "threads=1", "threads=2", "threads=4", "mkldnn=off", "isa=default", "isa=avx2", "onednn_isa=SSE41",
    "onednn_isa=AVX2", "mkl_cbwr=COMPATIBLE", "mkl_cbwr=AVX", "mkl_isa=SSE4_2", "mkl_isa=AVX2",
)  # fmt: skip
SETUPS = {
    **{f"cpu[{s}]": Setup(f"cpu[{s}]") for s in _CPUS},
    "plainest kernels": Setup(PLAINEST),
    "plainest kernels, channels last": Setup(PLAINEST, channels_last=True),
    "plainest kernels as reference, drift": Setup("cpu", ref=PLAINEST, drift=True),
    "channels last against contiguous": Setup("cpu", contiguous=True),
    "lazy": Setup("lazy"),
    "lazy, program on it": Setup("lazy", on_target=True),
}
COLUMNS = (
    "platform", "cases", "calls compared", "exactly equal", "rounding", "operators that differ", "max ULP",
    "max units of rounding", "unverified", "fallback", "unsupported", "true bugs", "false alarms",
)  # fmt: skip


def child(name, every, wanted, done):
    """Run the cases of one setup; a line before each, and its row after the batch."""
    setup = SETUPS[name]

    def say(line):
        print(json.dumps(line), flush=True)

    left = [case for case in setup.cases(every, wanted) if case.name not in done]
    for start in range(0, len(left), BATCH):
        for row in run_cases(setup, left[start : start + BATCH], lambda case: say({"begin": case.name})):
            say(row)


class Rows:
    """Rows by setup and case, kept in a file as they come."""

    def __init__(self, path, *, fresh):
        self.path = path
        if fresh:
            path.unlink(missing_ok=True)
        self.by_setup = collections.defaultdict(dict)
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            self.by_setup[row["setup"]][row["case"]] = row

    def add(self, row):
        self.by_setup[row["setup"]][row["case"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(name, every, wanted, rows, advance):
    """All cases of one setup, in a process of its own, and in another one for what is left where it dies."""
    # Lazy runs its graphs in a thread of its own; that and a pool of threads on few processors take 20 times as long.
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if SETUPS[name].target == "lazy" else {})
    while True:
        done = rows.by_setup[name]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            __spec__.name,
            "--child",
            name,
            "--every",
            str(every),
            "--case",
            wanted,
        ]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        ) as process:
            process.stdin.write(json.dumps(list(done)))
            process.stdin.close()
            begun = ""
            for line in process.stdout:
                row = json.loads(line)
                begun = row.get("begin", begun)
                if "case" in row:
                    begun = ""
                    rows.add({"setup": name} | row)
                    advance()
        if not process.returncode:
            return
        if not begun:
            raise SystemExit(f"{name}: the process ended with {process.returncode} before any case")
        rows.add({"setup": name, "case": begun, "died": process.returncode})
        advance()


def summary(rows):
    """One setup's rows in figures."""
    ran = [r for r in rows if "calls" in r]
    total = {k: sum(r[k] for r in ran) for k in ("calls", "equal", "rounding")}
    counts, reasons, operators = collections.Counter(), collections.Counter(), collections.defaultdict(list)
    for r in ran:
        counts.update(r["counts"])
        reasons.update(r["unverified"])
        for op, figures in r["operators"].items():
            operators[op].append(figures)
    worst = {op: {k: max(f[k] for f in figures) for k in figures[0]} for op, figures in operators.items()}
    found = [f | {"case": r["case"]} for r in ran for f in r["found"]]
    return {
        **total,
        "cases": len(ran),
        "operators": dict(sorted(worst.items())),
        "max_ulp": max((w["ulp"] for w in worst.values()), default=0),
        "max_units": max((w["units"] for w in worst.values()), default=0.0),
        "counts": dict(counts),
        "unverified": dict(reasons.most_common()),
        "true_bugs": [f for f in found if f["known"]],
        "false_alarms": [f for f in found if not f["known"]],
        "not_repeatable": [r["case"] for r in rows if r.get("repeatable") is False],
        "could_not_run": {r["case"]: r["raised"] for r in rows if "raised" in r},
        "died": [r["case"] for r in rows if "died" in r],
    }


def markdown(summaries):
    """The table, then what is not rounding."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for name, s in summaries.items():
        counts = s["counts"]
        compared = sum(v for k, v in counts.items() if k not in ("skipped", "unverified"))
        cells = (
            name, s["cases"], compared, s["equal"], s["rounding"], len(s["operators"]), s["max_ulp"],
            f"{s['max_units']:.3g}", counts.get("unverified", 0), counts.get("fallback", 0),
            counts.get("unsupported", 0), len(s["true_bugs"]), len(s["false_alarms"]),
        )  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""
    for name, s in summaries.items():
        for kind in ("true_bugs", "false_alarms"):
            keys = ("op", "status", "cause", "explanation", "known")
            said = collections.Counter(tuple(f[k] for k in keys) for f in s[kind])
            for (op, *words), n in said.items():
                yield f"- {name}: {kind.replace('_', ' ')[:-1]}, {n} x {op}: {', '.join(w for w in words if w)}"
        yield from (f"- {name}: plain runs of {case} differ among themselves" for case in s["not_repeatable"])
        yield from (f"- {name}: {case} did not run: {why}" for case, why in s["could_not_run"].items())
        yield from (f"- {name}: {case} killed the process" for case in s["died"])


def main(arguments=None):
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platform", default="*", help="pattern of the platforms' names, or a part of one")
    parser.add_argument("--every", type=int, default=1, help="of each family, one program in N; every Nth operator")
    parser.add_argument("--case", default="*", help="pattern of programs and operators")
    parser.add_argument("--output", type=Path, default=Path("real_platforms.json"))
    parser.add_argument("--fresh", action="store_true", help="forget the rows of a run that was stopped")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.every, options.case, set(json.load(sys.stdin)))
        return
    chosen = [n for n in SETUPS if fnmatch.fnmatchcase(n, options.platform) or options.platform in n]
    rows = Rows(options.output.with_suffix(".rows"), fresh=options.fresh)
    with Progress(console=Console(file=sys.stdout), transient=True, disable=not sys.stdout.isatty()) as progress:
        for name in chosen:
            task = progress.add_task(name, total=len(SETUPS[name].cases(options.every, options.case)))
            progress.advance(task, len(rows.by_setup[name]))
            measure(name, options.every, options.case, rows, lambda task=task: progress.advance(task))
    summaries = {n: summary(rows.by_setup[n].values()) for n in chosen}
    print("\n".join(markdown(summaries)))
    options.output.write_text(json.dumps(summaries, indent=1))
    sys.exit(any(s["false_alarms"] or s["died"] for s in summaries.values()))


if __name__ == "__main__":
    main()
