"""The pages of the guide that no other test runs, and what the site must not forget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxquant

DOCS = Path(__file__).parents[1] / "docs"
CASES = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())


@pytest.mark.parametrize("page", ["quickstart", "faq", "adding-a-format"])
def test_pages_run(page, tmp_path):
    """In a process of its own, since a page may register formats."""
    path = DOCS / f"{page}.md"
    assert path.read_text().count("\n>>> ") > 5
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "doctest", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_reported_bug_has_its_question():
    asked = re.findall(r"\{ #([a-z]\d\d) \}", (DOCS / "faq.md").read_text())
    assert sorted(asked) == sorted(case["id"].lower() for case in CASES)


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: jaxquant\.(?:\S+\.)?(\w+)$", pages, re.MULTILINE))
    source = Path(jaxquant.__file__).read_text()
    public = set(re.findall(r" as (\w+)$", source, re.MULTILINE)) - {"__version__"}
    assert "quantize" in public
    assert public - shown - set(jaxquant.records.__all__) == set()  # a page shows all of records


def test_every_page_is_in_the_navigation():
    navigation = (DOCS / "site" / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - listed == set()
