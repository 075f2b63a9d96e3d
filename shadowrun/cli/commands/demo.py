"""Train two small models on a simulated accelerator with flaws, and print the report: a first look in a minute.

A convolutional network learns real handwritten digits (scikit-learn's) for 20 steps, then a small
transformer for one. Every operator is compared with the CPU. No accelerator is needed.

Examples:
  shadowrun demo
  shadowrun demo --preset clean                  an accelerator without flaws: nothing is found
  shadowrun demo --preset clean --flaws maximum-drops-nan
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.cli import options
from shadowrun.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

_CNN_STEPS = 20
_TRANSFORMER_STEPS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flaws, and files to write."""
    options.add_simulation_arguments(parser, preset="young")
    parser.add_argument(
        "--directory", default=".", metavar="DIR", help="folder of the data file and the page (default: this one)"
    )
    options.add_output_arguments(parser, findings=True, digest=True)


def run(args: argparse.Namespace) -> int:
    """Train, print the report and write the files; returns the exit status."""
    options.check_outputs(args.output)
    folder = Path(args.directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The folder {args.directory!r} cannot be created ({error.strerror}): choose another --directory.",
            slug="unwritable-report",
        ) from error
    digits = _load_digits()

    from shadowrun.cli.program import import_torch

    import_torch()

    import torch

    import shadowrun
    from shadowrun.analysis.wording import shell_command
    from shadowrun.report.run_report import run_document

    # Before the comparison: a device must be registered when its platform is resolved.
    options.enable_simulation("sim", args.flaws, args.preset)
    torch.manual_seed(0)  # the demo's report is the same each time
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = folder / "shadowrun-demo.shadowrun"
    comparison = shadowrun.compare("sim", ref="cpu", file=data)
    _train(comparison, images.to("sim"), labels.to("sim"))
    options.print_report(run_document(comparison), args, always=True, more=f"{shell_command('report', data)} -v")
    page = folder / "shadowrun-demo.html"
    comparison.write(page)
    print(f"\nData file: {data}   ({shell_command('report', data)})\nReport:    {page}", file=sys.stderr)
    return 0


def _train(comparison: Any, images: Any, labels: Any) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from shadowrun.cli.commands import demo_models

    bar = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    # On standard error: standard output has the report, and may be piped.
    # No auto-refresh: it needs a thread, which the report would name as one that is not compared.
    with Progress(
        *bar, TextColumn("loss {task.fields[loss]}"), console=Console(stderr=True), auto_refresh=False
    ) as progress:
        for name, train, steps in (
            ("CNN on digits", demo_models.train_digits, _CNN_STEPS),
            ("Transformer  ", demo_models.train_transformer, _TRANSFORMER_STEPS),
        ):
            task = progress.add_task(name, total=steps, loss="-")
            with comparison:
                for loss in train(images, labels, steps):
                    progress.update(task, advance=1, loss=f"{loss:.4f}", refresh=True)
                    comparison.step()


def _load_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "The demo's images come with scikit-learn, which is not installed: pip install 'shadowrun[examples]'",
            slug="missing-extra",
        ) from error
    return load_digits()
