"""The JSON report: complete, sorted, diffable; non-finite numbers are strings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shadowrun.store.codec import jsonable

if TYPE_CHECKING:
    from shadowrun.report.content import Source

__all__ = ["FORMAT", "JsonReport"]

FORMAT = 1
"""Version of the JSON's form. History: 1, first version."""


class JsonReport:
    """Everything that the analyses say, for other programs; described in ``docs/datafile.md``."""

    extension = "json"

    def render(self, run: Source) -> str:
        """The report as text."""
        gate, coverage = run.gate(), run.coverage()
        document = {
            "format": FORMAT,
            "info": run.info,
            "passed": gate.passed,
            "gate": {"line": gate.line, "fail_on": gate.fail_on},
            "counts": run.counts(),
            "first_divergence": run.first_divergence(),
            "drift": run.drift(),
            "findings": run.findings(),
            "known": run.known(),
            "operators": run.summary(),
            "regions": run.regions(),
            "coverage": coverage,
            "percent_operators": coverage.percent_operators,
            "percent_calls": coverage.percent_calls,
            "notes": run.notes(),
            "own_failures": run.own_failures(),
            "steps": run.steps(),
            "sources": run.sources(),
        }
        return json.dumps(jsonable(document), indent=1, sort_keys=True, allow_nan=False) + "\n"
