"""ARCHITECTURE.md names every package, and only those that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_packages_and_page_agree():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    packages = {f"gapless.{path.parent.name}" for path in (ROOT / "src/gapless").glob("*/__init__.py")}
    native = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    named = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    assert named == packages | native
