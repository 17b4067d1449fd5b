"""The docs: the files that they name exist, and the examples of the pages for contributors run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = {"dualinfer", "tests", "benchmarks", "training"}
# Pages whose examples go on from one another, and the tests of what they add.
EXAMPLES = {
    "adding-a-family": "tests/parity tests/test_report.py -k pebble",
    "adding-an-op": "tests/test_decoder.py tests/kernels/test_damping.py tests/parity "
    "tests/kernels/test_implementations.py -k 'pebble or damped or ops'",
    "adding-a-kernel": "tests/kernels tests/test_kernel_ops.py tests/test_pallas_ops.py "
    "tests/test_decoder.py -k 'damp or pebble or ops_take or (lowering and (spill or 16))'",
}


def files() -> list[str]:
    """The repository's files, by their paths."""
    return [str(p.relative_to(ROOT)) for folder in CODE for p in (ROOT / folder).rglob("*.py")]


def examples(page: Path) -> list[tuple[str, str, str]]:
    """Kind, path and text of each example on a page: `python` is a new file, `diff` a change."""
    return re.findall(r"^```(python|diff)\n# (\S+\.py)\n(.*?)^```$", page.read_text(), re.M | re.S)


def apply(root: Path, kind: str, path: str, text: str) -> None:
    """Write an example into a copy of the repository; what a change replaces stands there once."""
    target = root / path
    if kind == "python":
        assert not target.exists(), f"{path} is no new file"
        target.write_text(text)
        return
    whole = target.read_text()
    for hunk in re.split(r"^@@\n", text, flags=re.M):
        lines = [line or " " for line in hunk.splitlines()]
        old, new = ("".join(f"{x[1:]}\n" for x in lines if x[0] in kept) for kept in (" -", " +"))
        assert whole.count(old) == 1, f"{path} has these lines {whole.count(old)} times:\n{old}"
        whole = whole.replace(old, new)
    target.write_text(whole)


@pytest.fixture
def copy(tmp_path):
    """A copy of the package and its tests."""
    for folder in ("dualinfer", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pyc*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    known = [*files(), *(path for _, path, _ in examples(page))]
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text())
    assert not [n for n in named if not any(f"/{path}".endswith(f"/{n}") for path in known)]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_examples_fit_the_files_that_they_change(copy):
    for name in EXAMPLES:
        for example in examples(ROOT / "docs" / "contributing" / f"{name}.md"):
            apply(copy, *example)


@pytest.mark.slow
def test_examples_run(copy):
    for name, tests in EXAMPLES.items():
        for example in examples(ROOT / "docs" / "contributing" / f"{name}.md"):
            apply(copy, *example)
        command = [sys.executable, "-m", "pytest", "-q", "-x", *shlex.split(tests)]
        run = subprocess.run(
            command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout[-5000:]
