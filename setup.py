"""What pyproject.toml cannot say: on PyPI the README's links lead to the repository's files."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
files = f"{project['urls']['Repository']}/blob/HEAD/"
readme = (HERE / "README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"\]\((?![a-z]+:|#)", rf"]({files}", readme),
    long_description_content_type="text/markdown",
)
