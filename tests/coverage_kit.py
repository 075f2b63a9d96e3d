"""Coverage files with chosen failures."""

import torch

from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo

PARTS = (Part.FORWARD, Part.BACKWARD, Part.OUT)
OPERATORS = ("add", "cumsum", "exp", "matmul", "softmax", "linalg.norm.subgradients_at_zero")

UNSUPPORTED = CaseFinding(Kind.UNSUPPORTED, "aten::cumsum", "aten::cumsum.out", "missing operator", "no kernel", "x")
MISMATCH = CaseFinding(Kind.MISMATCH, "aten::mm", "", "reduced precision", "inputs rounded to bf16", "3 of 4")
CRASH = CaseFinding(Kind.CRASH, "aten::exp", "", "", "signal 11 (SIGSEGV)")
FALLBACK = CaseFinding(Kind.SILENT_FALLBACK, "aten::exp", "", "silent fallback")


def write(path, failing, *, operators=OPERATORS, dtypes=("float32",), parts=PARTS, **info):
    """A sweep in which all cases pass, but for ``{(operator, dtype or None, part or None): finding}``."""
    described = {"target": "vpu", "ref": "cpu", "source": "opinfo", "versions": {"torch": torch.__version__}} | info
    file = CoverageFile.begin(path, SweepInfo(**described, started="2026-11-26T10:00:00", complete=True))
    for operator in operators:
        for dtype in dtypes:
            for part in parts:
                places = ((operator, d, p) for d in (dtype, None) for p in (part, None))
                found = [failing[place] for place in places if place in failing]
                file.add(Case(operator, dtype, part, 0), CaseOutcome.from_findings(found, "f32[2]"))
    file.close()
    return path
