"""What pyproject.toml cannot say: the README's links and pictures on PyPI are the repository's."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
repository = project["urls"]["Repository"]
readme = (HERE / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{repository}/raw/HEAD/", readme)

setup(
    long_description=re.sub(r"\]\((?![a-z]+:|#)", rf"]({repository}/blob/HEAD/", readme),
    long_description_content_type="text/markdown",
)
