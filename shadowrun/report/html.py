"""The HTML report: one file, no network, no script."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from shadowrun.report import words
from shadowrun.report.content import Content, Source

__all__ = ["HtmlReport", "summary_table"]


class HtmlReport:
    """A page that reads well without styles too, as some CI servers strip them."""

    extension = "html"

    def render(self, run: Source) -> str:
        """The page."""
        return _environment().get_template("report.html").render(content=Content.of(run))


def summary_table(run: Source) -> str:
    """The operator table alone, for notebooks."""
    return _environment().get_template("operators.html").render(content=Content.of(run))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shadowrun.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in words.__all__:
        environment.globals[name] = getattr(words, name)
    environment.filters["thousands"] = lambda n: f"{n:,}"
    return environment
