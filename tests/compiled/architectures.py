"""`compile_check` on 25 published architectures, tiny and with random weights: what a backend gets right and wrong.

Each model is checked in a process of its own, so that a crash or a hang is a row too; rows are written as they come,
and a run that is started again goes on where it stopped. Inductor and the others that train are asked for a training
step with dropout, those that only infer for the forward pass.

    python -m tests.compiled.architectures --backend inductor --json architectures.json
    python -m tests.compiled.architectures --backend openvino --model bert --model gpt2
"""

import argparse
import importlib
import importlib.metadata
import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from tests.transparency.architectures import ALL, build

OTHERS = {
    "turbine_cpu": ("turbine_cpu", "iree.turbine.dynamo", {}),
    "openvino": ("openvino", "openvino.torch", {}),
    # By default it computes products in bfloat16 where the processor can.
    "openvino-f32": ("openvino", "openvino.torch", {"options": {"config": {"INFERENCE_PRECISION_HINT": "f32"}}}),
}
"""Backends that only infer: name of the row, backend, module that registers it, and options."""
DROPOUT = 0.1
COLUMNS = ("model", "backend", "outcome", "first deviating node", "error against float64 (eager's)", "seconds")


def with_dropout(config):
    """Switch every kind of dropout on; skipped layers are a decision of Python's and would only break graphs."""
    for each in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for name, value in list(vars(each).items()):
            is_rate = isinstance(value, (int, float)) and not isinstance(value, bool)
            if ("drop" in name or "pdrop" in name) and "layer" not in name and is_rate:
                setattr(each, name, DROPOUT)


class HandedBack(logging.Handler):
    """What OpenVINO could not run and gave back to PyTorch, which it writes to its debug log only."""

    LOGGER = "openvino.frontend.pytorch.torchdynamo"

    def __init__(self):
        super().__init__()
        self.reasons = []
        self.listening = True
        for part in ("backend", "execute"):
            logger = logging.getLogger(f"{self.LOGGER}.{part}")
            logger.setLevel(logging.DEBUG)
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record):
        text = record.getMessage()
        if self.listening and ("failed with" in text or "Failed in" in text):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            first = next((k for k, line in enumerate(lines) if line.startswith("-- ")), len(lines) - 1)
            self.reasons.append(" ".join(lines[first : first + 2]).removeprefix("-- ")[:200])

    def tell(self, what, done, of):
        """Stop with the first search: a probe is no part of the program."""
        self.listening = self.listening and what in ("the whole program", "each graph")


def check(name, backend):
    """One row."""
    import shadowrun
    from shadowrun.compiled.rounding import RandomRecorder, RandomResults

    began = time.process_time(), time.perf_counter()
    train = backend not in OTHERS
    called, _, options = OTHERS.get(backend, (backend, "", {}))
    handed_back = HandedBack()
    torch.manual_seed(0)
    model, batch = build(name, with_dropout if train else lambda config: None)
    model = model.train(train)
    if not train:
        batch.pop("labels", None)
    if not train and name in ("t5", "whisper"):
        batch["decoder_input_ids"] = torch.randint(3, 99, (2, 8))
    random_results = RandomResults()
    with RandomRecorder(random_results), torch.set_grad_enabled(train):
        model(**batch)
    options = {**options, "on_progress": handed_back.tell}
    report = shadowrun.compile_check(model, backend=called, train=train, **options, **batch)
    print(report, file=sys.stderr)
    culprit = next((c for r in report.regions if r.localised for c in r.localised.culprits), None)
    errors = (culprit and culprit.errors) or report.errors
    children = os.times()  # a C++ compiler's time is that of children
    return {
        "outcome": str(report.outcome),
        "ok": report.ok,
        "error": report.error or next((r.error for r in report.regions if r.error), ""),
        "node": f"{culprit.op} in {culprit.module}".removesuffix(" in ") if culprit else "",
        "site": culprit.site if culprit else "",
        "evidence": report.verdict.evidence,
        "errors": None if errors is None else [e if math.isfinite(e) else None for e in errors.relative],
        "exact": report.verdict.cause is None and report.verdict.status == "match",
        "draws": len(random_results.kept),
        "handed_back": sorted(set(handed_back.reasons)),
        "graphs": report.n_graphs,
        "regions": {r.name: str(r.outcome) for r in report.regions},
        "operators": sum(r.n_nodes for r in report.regions),
        "breaks": {reason.strip().partition("\n")[0]: n for reason, n in report.graph_breaks.items()},
        "stages": {s.name: str(s.outcome) for s in report.ladder},
        "speed_ratio": report.speed_ratio,
        "memory_ratio": report.memory_ratio,
        "compile_s": report.compile_s,
        "steps": dict(report.seconds),
        "notes": list(report.notes),
        "processor_s": time.process_time() - began[0] + children.children_user + children.children_system,
        "seconds": time.perf_counter() - began[1],
    }


def in_process(name, backend, limit_s):
    """One row, whatever becomes of the process."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tests.compiled.architectures", "--one", name, "--backend", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"outcome": "hang", "ok": False, "error": f"no end within {limit_s:g} s", "seconds": limit_s}
    print(done.stderr[-4000:] if done.returncode else "", end="", file=sys.stderr)
    if done.returncode or not done.stdout.strip():
        lines = done.stderr.strip().splitlines() or [""]
        row = {"outcome": "crash", "ok": False, "error": f"exit status {done.returncode}: {lines[-1][:200]}"}
        return {**row, "seconds": time.perf_counter() - began}
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr[-6000:]}


def line(name, backend, row):
    """A line of the table."""
    ours, theirs = row.get("errors") or (None, None)
    shown = "equal" if row.get("exact") else "" if ours is None else f"{ours:.1e} ({theirs:.1e})"
    error, node = row.get("error", ""), row.get("node", "")
    if error and row["outcome"] not in row.get("regions", {}).values():
        node = f"{error}" + (f"; wrong: {node}" if node else "")
    back = "".join(f"run by PyTorch: {reason}" for reason in row.get("handed_back", [])[:1])
    found = node or error or back or ", ".join(row.get("breaks", {}))
    # Models this small tell nothing about speed.
    outcome = row["outcome"].replace("slower than eager", "ok")
    cells = (name, backend, outcome, found.replace("|", "\\|")[:110], shown, f"{row['seconds']:.0f}")
    return f"| {' | '.join(cells)} |"


def table(rows):
    """Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for key, row in rows.items():
        backend, name = key.split("/")
        yield line(name, backend, row)


def versions():
    """Of what was measured."""
    names = ("torch", "transformers", "iree-turbine", "iree-base-compiler", "iree-base-runtime", "openvino")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="any that torch.compile knows (default: %(default)s)")
    parser.add_argument("--model", action="append", choices=sorted(ALL), help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="file of the rows; those in it are not measured again")
    parser.add_argument("--time-limit", type=float, default=1200.0, metavar="S", help="for a model (default: 1200)")
    parser.add_argument("--one", choices=sorted(ALL), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend in OTHERS:
        importlib.import_module(OTHERS[args.backend][1])
    if args.one:
        warnings.simplefilter("ignore")
        print(json.dumps(check(args.one, args.backend)))
        return 0
    content = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rows": {}}
    content["versions"] = {**content.get("versions", {}), **versions()}
    wanted = args.model or list(ALL)
    for k, name in enumerate(wanted, start=1):
        key = f"{args.backend}/{name}"
        if key not in content["rows"]:
            content["rows"][key] = in_process(name, args.backend, args.time_limit)
            if args.json:
                args.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{k} of {len(wanted)} {line(name, args.backend, content['rows'][key])}", file=sys.stderr, flush=True)
    rows = {f"{args.backend}/{name}": content["rows"][f"{args.backend}/{name}"] for name in wanted}
    print("\n".join(table(rows)))
    return 0 if all(row["ok"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
