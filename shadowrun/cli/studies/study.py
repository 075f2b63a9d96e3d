"""Run an experiment of published work on this machine, and print its table in the published form.

Studies:
  order            the order in which sum, dot, mv, mm, bmm and conv add, as trees (FPRev, arXiv 2411.00442)
  casts            equivalence classes of two nets in float16, bfloat16, float32 and float64
  cores            classes by number of threads
  multiplications  classes and remaining precision of a convolution of 10^3 to 10^8 multiplications
  distributions    classes of one convolution for 3 distributions of weights and 4 of inputs
  activations      deviating elements and remaining precision before and after ReLU and sigmoid
  resnet18         classes and kernels per layer of a ResNet-18, on 49 virtual platforms
  untrained        classes along nets with random weights

All but `order` record nets that are built from code, with weights from a seed, on virtual platforms: settings of this
CPU, each in a fresh process. All but `order` and `resnet18` are of Schlögl et al., NeurIPS 2023.

Examples:
  shadowrun study order                                    the operators in float32, on virtual platforms of this CPU
  shadowrun study order --target cuda --dtypes float16     the fused additions of a GPU's matrix units
  shadowrun study order --ops mm --shape mm=4x256x4 -o order.html
  shadowrun study order --quick                            two platforms only
  shadowrun study casts -o casts.html                      with dendrograms
  shadowrun study resnet18 -j 2 -o resnet18.html           which layers split the platforms, and their kernels
  shadowrun study cores --target 'cpu[threads=1]' --target 'cpu[threads=2]'

Exit status:
  0  the study ran; 2  wrong usage, or a platform that is absent
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import PlatformError, UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from shadowrun.report.document import Document
    from shadowrun.studies.published.mask_probe import SumKernel

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The study, platforms, and the output."""
    parser.add_argument("study", choices=tuple(_STUDIES), metavar="NAME", help=f"one of {', '.join(_STUDIES)}")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="T",
        help="platform to run on, such as cuda or 'cpu[isa=avx2]' (may be repeated; default: virtual platforms "
        "of this CPU)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer platforms and smaller cases")
    parser.add_argument(
        "-j",
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="platforms recorded at a time (default: 1; not for order)",
    )
    order = parser.add_argument_group("order")
    order.add_argument("--ops", type=options.words, default=[], metavar="A,B", help="probe only these operators")
    order.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="OP=SIZES",
        help="probe an operator with these sizes, such as mm=8x64x8 (rows x summands x columns; may be repeated)",
    )
    order.add_argument(
        "--dtypes", type=options.words, default=[], metavar="A,B", help="dtypes to probe (default: float32)"
    )
    options.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the study and print its table; returns the exit status."""
    options.check_outputs(args.output)
    options.print_report(_STUDIES[args.study](args), args)
    return 0


def _order(args: argparse.Namespace) -> Document:
    if args.jobs != 1:
        raise UsageError("--jobs is for studies that record platforms: the study order has none.", slug="bad-option")

    from shadowrun.studies.published.mask_probe import DTYPES
    from shadowrun.studies.published.summation_order import PLATFORMS, QUICK_PLATFORMS, order_document, probe_platform

    kernels = _kernels(args.ops, args.shape)
    dtypes = args.dtypes or ["float32"]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"--dtypes {dtype!r}: use {', '.join(DTYPES)}.", slug="bad-option")
    targets = args.target or (QUICK_PLATFORMS if args.quick else PLATFORMS)
    probed, absent = [], []
    with progress_bar(args.study, len(targets)) as update:
        for number, target in enumerate(targets):

            def show(kernel: SumKernel, number: int = number, target: str = target) -> None:
                update(number, text=f"{target}: {kernel.name}")

            try:
                probed += probe_platform(target, kernels, dtypes, show)
            except PlatformError as error:
                # A platform of the default list need not exist here; one that the user names must.
                if args.target:
                    raise
                absent.append((target, str(error)))
    return order_document(probed, absent)


def _kernels(ops: list[str], shapes: list[str]) -> list[SumKernel]:
    """The operators to probe, with their shapes."""
    from shadowrun.studies.published.summation_order import KERNELS, kernel_of, read_shape

    for name in ops:
        if name not in KERNELS:
            raise UsageError(f"--ops {name!r}: use {', '.join(KERNELS)}.", slug="bad-option")
    asked = [read_shape(text) for text in shapes]
    names = ops or list(dict.fromkeys(name for name, _ in asked)) or list(KERNELS)
    for name, _ in asked:
        if name not in names:
            raise UsageError(f"--shape {name}=…: --ops leaves {name} out.", slug="bad-option")
    return [
        kernel_of(name, shape) for name in names for shape in ([s for n, s in asked if n == name] or KERNELS[name][2])
    ]


def _recorded(args: argparse.Namespace) -> Document:
    from shadowrun.studies.published.recorded_studies import record_study
    from shadowrun.studies.published.tables import study_document

    for option in ("ops", "shape", "dtypes"):
        # An option without an effect would be taken for one that had it.
        if getattr(args, option):
            raise UsageError(f"--{option} is an option of the study order, not of {args.study}.", slug="bad-option")
    if len(args.target) == 1:
        raise UsageError("Classes need two platforms or more: repeat --target.", slug="bad-option")
    if args.jobs < 1:
        raise UsageError(f"-j {args.jobs}: use a number of processes >= 1.", slug="bad-option")
    with progress_bar(f"{args.study}: platforms") as progress:
        found = record_study(args.study, args.target, quick=args.quick, jobs=args.jobs, progress=progress)
    return study_document(found)


_STUDIES: dict[str, Callable[[argparse.Namespace], Document]] = {
    "order": _order,
    "casts": _recorded,
    "cores": _recorded,
    "multiplications": _recorded,
    "distributions": _recorded,
    "activations": _recorded,
    "resnet18": _recorded,
    "untrained": _recorded,
}
