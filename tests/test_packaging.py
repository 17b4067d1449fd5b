"""What setuptools builds: an editable install found from everywhere, a whole source release."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")  # they share what is built

ROOT = Path(__file__).parents[1]
BUILD = """
from setuptools import build_meta
build_meta.build_editable("editable")
build_meta.build_sdist("source")
"""
PARTS = ("dualinfer", "tests", "docs", "examples", "benchmarks", "training")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folders `editable` and `source` of a copy of the repository, without weights."""
    copy = tmp_path_factory.mktemp("build") / "dualinfer"
    kept_out = shutil.ignore_patterns("*.safetensors", "__pycache__", "*.png", "out")
    for part in (*PARTS, ".ci"):
        shutil.copytree(ROOT / part, copy / part, ignore=kept_out)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    run = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return copy


def test_editable_install_is_a_path_which_no_folder_of_the_name_hides(built):
    """An import hook comes after the path: the clone beside a script would be an empty package."""
    with zipfile.ZipFile(next((built / "editable").iterdir())) as wheel:
        (name,) = (n for n in wheel.namelist() if not n.split("/")[0].endswith(".dist-info"))
        assert name.endswith(".pth") and Path(wheel.read(name).decode().strip()).samefile(built)


def test_source_release_is_the_repository(built):
    with tarfile.open(next((built / "source").iterdir())) as source:
        held = {name.partition("/")[2] for name in source.getnames()}
        (info,) = (m for m in source.getmembers() if re.fullmatch("[^/]*/PKG-INFO", m.name))
        said = email.message_from_bytes(source.extractfile(info).read())
    files = {p for part in PARTS for p in (built / part).rglob("*") if p.is_file()}
    assert {str(p.relative_to(built)) for p in files} <= held
    assert {"Makefile", "constraints.txt", "LICENSE", "CHANGELOG.md", ".ci/run"} <= held
    assert {"mkdocs.yml", "SECURITY.md", "CITATION.cff"} <= held
    assert said["License-Expression"] == "Apache-2.0"
    links = re.findall(r"\]\(([^)]*)\)", str(said.get_payload()))
    assert links and all(re.match("https://|#", link) for link in links)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", str(said.get_payload()))
    assert pictures and all("/raw/HEAD/" in link for link in pictures)


PAGES = ["README.md", "docs/coming-from-deepspeed.md", "docs/config.md", "docs/jax.md"]
PAGES += ["docs/many-devices.md", "docs/models.md", "docs/serving.md", "docs/text.md"]


def prose(text):
    """The lines outside of code and tables."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    return [line for line in text.splitlines() if not line.startswith("|")]


def anchors(path):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_pages_for_users_are_readable_and_their_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [line for line in prose(text) if len(line) > 110] == []
    links = re.findall(r"\]\((?![a-z]+:)([^)#]*)#?([^)]*)\)", text)
    assert links
    for name, anchor in links:
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_each_mutation_finds_its_place():
    """A row of `tests/mutate.py` whose text has gone would tell nothing from then on."""
    from . import mutate

    stale = []
    for number, row in enumerate(mutate.ROWS):
        text = (ROOT / "dualinfer" / row.file).read_text()
        if mutate.mutated(row, text) is None:
            stale.append((number, row.file, row.old))
    assert not stale
