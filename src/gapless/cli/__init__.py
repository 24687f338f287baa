"""The command line: parses, calls the library and prints."""

import sys

from gapless._version import __version__


def main() -> None:
    """Entry of `gapless` and of `python -m gapless`."""
    if sys.argv[1:] == ["--version"]:  # at once, before anything large is imported
        print(f"gapless {__version__}")
        return
    from gapless.cli.app import app

    app(prog_name="gapless")
