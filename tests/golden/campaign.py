"""A made-up campaign with everything a report can show: two platforms, compiled code, known, new and gone causes."""

from shadowrun.studies.campaign.causes.cause_report import CauseFile
from shadowrun.studies.campaign.causes.root_causes import Seen, root_causes
from shadowrun.studies.campaign.oracles import FIRED, to_mask
from shadowrun.studies.campaign.run_variants import VariantFinding
from shadowrun.studies.campaign.summary import Platform, Session, Summary, count_oracles

MM = VariantFinding(
    "aten::mm", "bf16", "mismatch", "reduced precision", "inputs rounded to bf16",
    "output 0: 96 of 96 elements beyond rounding; greatest excess 3.39e+04 units of rounding against 1.27 of the "
    "reference; holds for all 96 mismatched elements",
)  # fmt: skip
CUMSUM = VariantFinding("aten::cumsum", "f32", "unsupported operator", "", "NotImplementedError", "no kernel for npu")
TOPK = VariantFinding("aten::topk", "f32", "error", "", "RuntimeError", "k is out of range")
ERFINV = VariantFinding("aten::erfinv", "", "crash", "", "signal 11 (SIGSEGV)", "")
MAXIMUM = VariantFinding(
    "aten::maximum", "f32", "mismatch", "exceptional values", "NaN treated as missing", "output 0[1]: 0 against nan"
)
INDUCTOR = VariantFinding(
    "", "", "error", "", "inductor: BackendCompilerFailed", "ValueError: <script>alert(1)</script> of | and `x`"
)
SCRIPT = """\
# aten::mm is wrong on npu: reduced precision, inputs rounded to bf16.
import torch
import torch_npu
torch.set_printoptions(precision=9)

def call(device):
    x = {"self": torch.tensor([[1.0]], device=device), "mat2": torch.tensor([[0.14367499947547913]], device=device)}
    out = torch.ops.aten.mm.default(x["self"], x["mat2"])
    return {"output 0": out}

print("cpu", call("cpu"))
print("npu", call("npu"))
"""


def _platform(name, masks, **facts):
    counted, n_compared, n_fired = count_oracles([(to_mask(frozenset(names)), n) for names, n in masks])
    return Platform(name, oracles=counted, n_compared=n_compared, n_fired=n_fired, **facts)


def campaign():
    """Its summary."""
    seen = [
        *(Seen(n, 0, 12 - n % 5, MM) for n in range(3, 120)),
        *(Seen(n, 0, 9, CUMSUM) for n in range(40, 55)),
        *(Seen(n, t, 4, MAXIMUM) for n in range(200, 207) for t in (0, 1)),
        Seen(77, 0, 3, ERFINV),
        Seen(78, 1, 3, TOPK),
        *(Seen(n, 2, 7, INDUCTOR) for n in (11, 12)),
    ]
    npu = _platform(
        "npu",
        [((), 700), (("bitwise", FIRED), 60), (("bitwise", "shadowrun", FIRED, "allclose 1e-4", "dynamo"), 117)],
        statuses={"ok": 745, "finding": 125, "unsupported": 15, "unverified": 4},
        ops={"ok": 180, "unsupported": 2, "fallback": 3, "error": 1},
        n_ops_of_reference=186,
        missing=("aten::cumsum", "aten::lerp.Scalar"),
        causes={"reduced precision": 117, "exceptional values": 7},
        cpu_ms=36_000.0,
    )
    isa = _platform(
        "cpu[isa=default]",
        [((), 500), (("bitwise", FIRED), 380), (("bitwise", "shadowrun", FIRED), 8)],
        statuses={"ok": 880, "finding": 8},
        ops={"ok": 186},
        n_ops_of_reference=186,
        causes={"exceptional values": 7, "": 1},
        cpu_ms=30_000.0,
    )
    compiled = Platform(
        "npu, inductor", {"ok": 870, "finding": 5, "unverified": 13}, {}, 186, n_failed=2, cpu_ms=900_000.0
    )
    causes = tuple(root_causes(seen, 2))
    by_op = {c.signature.op: str(c.signature) for c in causes}
    return Summary(
        title="npu, cpu[isa=default], npu, inductor against cpu",
        stages=(
            ("transformers: a model of its own", 718, 587, {"has no model of its own in the tables": 131}),
            ("transformers: runs on generated values", 587, 375, {"TypeError": 120, "no end within": 92}),
            ("programs of the campaign", 375, 375, {}),
            ("recipes", 1000, 900, {"duplicate": 100}),
            ("variants", 900, 888, {"crash while it was made": 2, "RuntimeError": 10}),
            ("results on npu", 888, 870, {"unsupported": 15, "unverified": 4}),
        ),
        platforms=(npu, isa, compiled),
        root_causes=causes,
        validity={"insert": (400, 400), "exceptional": (120, 118), "size": (380, 370), "backward": (90, 90)},
        n_variants=900,
        n_duplicates=100,
        invalid=(("RuntimeError", 10), ("crash while it was made", 2)),
        wall_s=130.0,
        jobs=2,
        new=frozenset({by_op["aten::maximum"], by_op["aten::erfinv"]}),
        gone=("mismatch aten::softmax, float: implementation",),
        known={by_op["aten::topk"]: "vendor ticket 123"},
        scripts={
            by_op["aten::mm"]: CauseFile(
                by_op["aten::mm"],
                '["72d707197e7f", [], 3]',
                3,
                SCRIPT,
                "self f32[1, 1], mat2 f32[1, 1]",
                "repro.py",
                1,
                "output 0[0, 0]: 0.143554688 on npu, 0.143674999 on cpu\n"
                "output 0: 1 of 1 elements differ by more than rounding explains",
            ),
            by_op["aten::erfinv"]: CauseFile(
                by_op["aten::erfinv"], "[]", notes=("its process does not end any more, or between two calls",)
            ),
        },
        sessions=(
            Session("2026-11-01T08:00:00+00:00", 2, 600, 80.0, 150.0),
            Session("2026-11-01T09:00:00+00:00", 2, 400, 50.0, 96.0),
        ),
        versions={"native": "compiled", "python": "3.11.7", "shadowrun": "0.1.0", "torch": "2.13.0"},
        recipes={3: '["72d707197e7f",[["insert",3,0,"tanh"],["batch-slice",2,1]],3]'},
    )
