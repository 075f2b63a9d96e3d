"""Sphinx configuration, and the reference of the command line, which argparse writes."""

from __future__ import annotations

import argparse
import os
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

from sphinx.domains.python import PyObject

import shadowrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

project = "shadowrun"
author = "The shadowrun developers"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = metadata.version("shadowrun")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"shadowrun {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# Docstrings are Google's style.
napoleon_use_ivar = True
napoleon_use_rtype = False
# Their classes are bases of ours; the documentation needs none of them installed.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# Pages of other hosts are checked by `nox -s linkcheck -- --external`, where the network allows it.
linkcheck_ignore = [] if os.environ.get("LINKCHECK_EXTERNAL") else [r"https?://"]

_CLI_PAGE = "reference/cli"
_MADE_BY_USER = ("Config", "Callback", "TrainerCallback", "NonFiniteError")
"""Classes whose arguments are documented; others are made by shadowrun alone."""


def cli_reference() -> str:
    """Help of each command, as Markdown."""
    from shadowrun.cli.main import build_parser

    with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
        return "\n".join(_of_commands(build_parser(), 2))


def _of_commands(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    # Programs have no other way to the commands of a parser; `sphinx-argparse` reads the same attribute.
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in (pair for group in groups for pair in group.choices.items()):
        heading = command.prog if level > 2 else f"shadowrun {name}"
        yield f"{'#' * level} {heading}\n\n```text\n{command.format_help().rstrip()}\n```\n"
        yield from _of_commands(command, level + 1)


def _add_commands(_: Sphinx, page: str, source: list[str]) -> None:
    if page == _CLI_PAGE:
        source[0] += "\n" + cli_reference()


def _without_arguments(_: Sphinx, what: str, name: str, *__: Any) -> tuple[str, None] | None:
    hidden = what == "class" and name.rpartition(".")[2] not in _MADE_BY_USER
    return ("", None) if hidden else None


def _link_names(*arguments: Any) -> None:
    """In docstrings, a name in single backticks is a link if it is public, and code if not."""
    lines: list[str] = arguments[-1]

    def linked(found: re.Match[str]) -> str:
        name = found[1].removesuffix("()").removeprefix("shadowrun.")
        is_public = name.partition(".")[0] in shadowrun.__all__
        return f":py:obj:`shadowrun.{name}`" if is_public else f"``{found[1]}``"

    # Sphinx would take the first of several names for the type of the second.
    lines[:] = [re.sub(r"^:ivar [^:]*:", lambda found: found[0].replace(", ", ",\u200b"), line) for line in lines]
    lines[:] = [re.sub(r"(?<![`:])`([^`]+)`(?!`)", linked, line) for line in lines]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":  # else each attribute is a link to any other of its name
            field.rolename = ""
    app.connect("source-read", _add_commands)
    app.connect("autodoc-process-docstring", _link_names)
    app.connect("autodoc-process-signature", _without_arguments)
