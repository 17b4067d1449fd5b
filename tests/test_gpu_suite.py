"""The plugin of `make test-gpu`: a test that hangs ends its process, and is tried once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import time
def test_hangs(): time.sleep(60)
def test_ends(): pass
"""


@pytest.mark.slow
def test_a_test_that_hangs_is_tried_once_and_leaves_nothing(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "temp").mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path / "temp")}
    command = [sys.executable, *"-m pytest -q -p tests.gpu_suite -p no:cacheprovider".split()]
    how = {"cwd": tmp_path, "env": env | {"GPU_TEST_SECONDS": "2"}, "timeout": 120}
    how |= {"capture_output": True, "text": True}

    run = subprocess.run([*command, *"-n 1 --dist loadgroup".split()], **how)
    assert "it ended its process" in run.stdout, run.stdout
    assert "1 failed, 1 passed, 1 error" in run.stdout, run.stdout
    assert not [*(tmp_path / "temp").glob("gpu-*")]

    alone = subprocess.run(command, **how)
    assert alone.returncode != 0 and "test_hangs" in alone.stderr
    assert not [*(tmp_path / "temp").glob("gpu-*")]
