"""docs/serving.md tells of every option of `gapless serve`, as the command line has it."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from gapless.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


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
    page = PAGE.read_text("utf-8")
    table = re.search(r"\| option \| variable \|.*?\n\|[-|]+\|\n(.*?)\n\n", page, re.DOTALL)
    assert table is not None
    assert table.group(1).splitlines() == rows()
