"""docs/serving.md tells of every option and every metric of `gapless serve`; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from gapless.cli.app import app
from gapless.server.metrics import ServerMetrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "serving.md").read_text("utf-8")


def rows() -> list[str]:
    """The lines of the page's table."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    lines = []
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        name = "MODEL" if parameter.param_type_name == "argument" else parameter.opts[0]
        if parameter.secondary_opts:
            name += f"`, `{parameter.secondary_opts[0]}"
        # The help tells the default where there is no value for it.
        text, _, default = (parameter.help or "").rstrip("]").partition(" [default: ")
        if not default and parameter.default is not None and not parameter.required:
            value = parameter.default
            default = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"
        lines.append(f"| `{name}` | `{parameter.envvar}` | {default} | {text} |")
    return lines


def test_the_table_of_options_is_that_of_the_command_line() -> None:
    table = re.search(r"\| option \| variable \|.*?\n\|[-|]+\|\n(.*?)\n\n", PAGE, re.DOTALL)
    assert table is not None
    assert table.group(1).splitlines() == rows()


def test_every_metric_is_told_of() -> None:
    names = {metric.name for metric in ServerMetrics("model").registry.collect()}
    assert {name for name in names if not re.search(rf"`{name}(_total)?`", PAGE)} == set()


def test_links_lead_to_files() -> None:
    for page in [*DOCS.glob("*.md"), *DOCS.glob("clients/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_index_of_clients_is_complete() -> None:
    index = (DOCS / "clients" / "README.md").read_text("utf-8")
    pages = {page.name for page in DOCS.glob("clients/*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([a-z-]+\.md)\)", index))
