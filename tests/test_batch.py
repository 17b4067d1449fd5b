"""`engine.batch` and `dualinfer batch`: OpenAI's batch format, and jobs that are killed."""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from typer.testing import CliRunner

import dualinfer
from dualinfer.cli import main as cli
from dualinfer.errors import ArgumentError, BackendNotAvailableError
from dualinfer.serving.http import batch as files
from dualinfer.serving.http.batch import BatchFileError, run_file
from dualinfer.serving.http.rows import answer_rows

TEMPLATE = "{% for m in messages %}# {{ m['content'] }}\n{% endfor %}def "


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def engine(request):
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend=request.param, dtype="fp32") as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


def row(name, url="/v1/completions", **body):
    fields = {"model": "m"} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": fields}


def text_row(name, prompt, new=6, **more):
    return row(name, prompt=prompt, max_tokens=new, temperature=0, **more)


def test_rows_have_the_answers_of_each_alone(engine):
    prompts = [f"def f{i}(" + "a, " * (i % 4) for i in range(30)]
    rows = [text_row(f"r{i}", prompt, 3 + i % 5) for i, prompt in enumerate(prompts)]
    chat = [{"role": "user", "content": "copy a file"}]
    how = {"messages": chat, "max_completion_tokens": 8, "temperature": 0}
    rows.append(row("chat", "/v1/chat/completions", **how))
    rows.append(row("vector", "/v1/embeddings", input=["def f(", "class"]))
    results = {one["custom_id"]: one for one in engine.batch(iter(rows))}
    assert len(results) == 32 and all(one["error"] is None for one in results.values())
    assert {one["response"]["status_code"] for one in results.values()} == {200}
    for i, prompt in enumerate(prompts):
        body = results[f"r{i}"]["response"]["body"]
        expected = engine.generate_text(prompt, max_new_tokens=3 + i % 5, do_sample=False)
        assert body["choices"][0]["text"] == expected
        assert body["usage"]["completion_tokens"] == 3 + i % 5
    said = ChatCompletion.model_validate(results["chat"]["response"]["body"])
    expected = engine.chat(chat, max_new_tokens=8, do_sample=False)
    assert said.choices[0].message.content == expected
    data = results["vector"]["response"]["body"]["data"]
    assert np.allclose([x["embedding"] for x in data], engine.embed(["def f(", "class"]), atol=1e-6)
    assert len({one["id"] for one in results.values()}) == 32


BAD = {
    "invalid_row": 7,
    "missing_custom_id": {"method": "POST", "url": "/v1/completions", "body": {}},
    "invalid_method": text_row("a", "x") | {"method": "GET"},
    "invalid_url": row("b", "/v1/files"),
    "invalid_body": text_row("c", "x") | {"body": "x"},
    "invalid_request": text_row("d", "x", stream=True),
    "unknown_field": text_row("e", "x") | {"priority": 1},
}


def test_a_bad_row_fails_alone(engine):
    rows = [*BAD.values(), text_row("good", "def f("), text_row("good", "def g(")]
    refused = [text_row("old", "x", best_of=2), text_row("long", "x " * 3000)]
    results = list(engine.batch([*rows, *refused]))
    assert len(results) == len(rows) + 2
    codes = Counter(one["error"]["code"] for one in results if one["error"])
    assert codes == Counter([*BAD, "duplicate_custom_id"])
    names = {one["error"]["code"]: one["custom_id"] for one in results if one["error"]}
    assert [names[code] for code in BAD] == [None, None, "a", "b", "c", "d", "e"]
    answered = {one["custom_id"]: one["response"] for one in results if one["response"]}
    assert [answered[n]["status_code"] for n in ("good", "old", "long")] == [200, 400, 400]
    assert answered["old"]["body"]["error"]["param"] == "best_of"


def test_rows_are_taken_as_they_are_needed_and_left_where_nobody_reads_on(engine):
    taken = 0

    def rows():
        nonlocal taken
        while True:
            taken += 1
            yield text_row(f"r{taken}", "def f(", 20 if taken < 3 else 400)

    results = answer_rows(engine, rows(), window=16)
    assert next(results)["response"]["status_code"] == 200
    assert next(results)["response"]["status_code"] == 200
    assert 16 <= taken <= 18
    results.close()
    begun = time.monotonic()
    while engine.traffic().live or engine.traffic().waiting:
        assert time.monotonic() - begun < 20
        time.sleep(0.01)

    async def main():  # as in a notebook, whose loop runs
        return [one["custom_id"] for one in engine.batch([text_row("one", "def f(", 2)])]

    assert asyncio.run(main()) == ["one"]


def test_what_is_no_batch_is_refused(engine, monkeypatch):
    with pytest.raises(ArgumentError, match="rows is a dict; expected an iterable of dicts"):
        engine.batch({"custom_id": "a"})
    with pytest.raises(ArgumentError, match="rows is an int; expected"):
        engine.batch(5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendNotAvailableError, match=r"Install `dualinfer\[serve\]`"):
        engine.batch([])


# Files


def write(path: Path, rows) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows))
    return path


def read(path: Path):
    assert path.read_bytes().endswith(b"\n")
    return [json.loads(line) for line in path.read_text().splitlines()]


def echo(rows):
    """Answers of nobody: what `answer_rows` gives for rows, without a model."""
    for one in rows:
        result = {"custom_id": None, "response": None, "error": None}
        if isinstance(one, Exception):
            result["error"] = {"code": one.code, "message": str(one)}
            result |= {"line": one.line} if one.line else {}
        else:
            result["custom_id"] = one["custom_id"]
            result["response"] = {"status_code": 200, "body": {"usage": {"completion_tokens": 2}}}
        yield result


def test_lines_that_are_no_rows_are_results_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE", 2000)
    monkeypatch.setattr(files._lines, "__defaults__", (2000,))
    rows = [text_row("ä\u2028b", "x"), "{", "", json.dumps(text_row("long", "x" * 9000)), "[1]"]
    source = write(tmp_path / "in.jsonl", [*rows, text_row("last", "x")])
    source.write_bytes(source.read_bytes() + b"\xff\xfe")  # without a newline at its end
    out = tmp_path / "out.jsonl"
    for done in (6, 0):
        progress = run_file(echo, source, out)
        assert (progress.done, progress.before + progress.done) == (done, 6)
    results = read(out)
    assert [one["custom_id"] for one in results] == ["ä\u2028b", None, None, None, "last", None]
    assert [one.get("line") for one in results] == [None, 2, 4, 5, None, 7]
    codes = ["invalid_json", "line_too_long", "missing_custom_id", "invalid_json"]
    assert [one["error"]["code"] for one in results if one["error"]] == codes


def test_shards_share_a_file_out(tmp_path):
    source = write(tmp_path / "in.jsonl", [text_row(f"r{i}", "x") for i in range(10)])
    found = []
    for i in range(3):
        run_file(echo, source, out := tmp_path / f"{i}.jsonl", (i, 3))
        found += [one["custom_id"] for one in read(out)]
    assert sorted(found) == [f"r{i}" for i in range(10)]


def test_files_that_do_not_fit_are_refused(tmp_path):
    good = write(tmp_path / "in.jsonl", [text_row(f"r{i}", "x") for i in range(4)])
    out = tmp_path / "out.jsonl"
    twice = write(tmp_path / "twice.jsonl", [text_row(n, "x") for n in "abca"])
    with pytest.raises(BatchFileError, match="lines 1 and 4 have the same custom_id 'a'"):
        run_file(echo, twice, out)
    with pytest.raises(BatchFileError, match="holds no rows"):
        run_file(echo, write(tmp_path / "none.jsonl", ["", " "]), out)
    with pytest.raises(ArgumentError, match="is the input"):
        run_file(echo, good, good)
    run_file(echo, good, out)
    other = write(tmp_path / "other.jsonl", [text_row("z", "x")])
    with pytest.raises(BatchFileError, match="line 1 is the result of a row that the input has no"):
        run_file(echo, other, out)
    out.write_bytes(out.read_bytes() + out.read_bytes())
    with pytest.raises(BatchFileError, match="line 5 repeats the result of a row"):
        run_file(echo, good, out)
    with pytest.raises(BatchFileError, match="line 1 is no result of a batch"):
        run_file(echo, good, write(tmp_path / "notes.txt", ["notes"]))

    def nested(rows):
        with pytest.raises(BatchFileError, match="another process writes to it"):
            run_file(echo, good, out)
        yield from echo(rows)

    out.unlink()
    assert run_file(nested, good, out).done == 4


def test_a_line_that_a_full_disk_cut_off_is_as_if_it_never_was(tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", [text_row(f"r{i}", "x") for i in range(9)])
    out, write_ = tmp_path / "out.jsonl", os.write

    def full(fd, data):
        if b"r5" in data:
            return write_(fd, data[:10])
        return write_(fd, data)

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="was not written whole"):
        run_file(echo, source, out)
    assert len(read(out)) == 5
    monkeypatch.undo()
    assert run_file(echo, source, out).done == 4


def test_every_place_at_which_a_line_may_be_torn(tmp_path):
    source = write(tmp_path / "in.jsonl", [text_row("a", "x"), "{", text_row("c", "x")])
    out = tmp_path / "out.jsonl"
    run_file(echo, source, out)
    whole = out.read_bytes()
    for size in range(0, len(whole), 5):
        out.write_bytes(whole[:size])
        run_file(echo, source, out)
        assert out.read_bytes() == whole


JOB = """
import json, sys, time
from pathlib import Path
from dualinfer.serving.http.batch import run_file
def slowly(rows):
    for i, one in enumerate(echo(rows)):
        if i % 50 == 0:
            time.sleep(0.01)
        yield one
run_file(slowly, Path(sys.argv[1]), Path(sys.argv[2]))
"""


def killed(command, out, lines):
    """Run a job until its output has so many lines, and kill it, unless it has ended meanwhile."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    begun, has_ended = time.monotonic(), False
    while not out.exists() or out.read_bytes().count(b"\n") < lines:
        assert not has_ended and time.monotonic() - begun < 120
        has_ended = process.poll() is not None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() in (-signal.SIGKILL, 0)  # a busy machine may be late
    return out.read_bytes().count(b"\n")


@pytest.mark.slow
def test_a_job_that_is_killed_twice_has_every_id_once(tmp_path):
    """The command itself: one row in a hundred is bad."""
    rows = [text_row(f"r{i}", f"def f{i}(", 24, model="embedded") for i in range(300)]
    for i in range(0, 300, 100):
        rows[i + 7] = rows[i + 7] | {"method": "GET"}
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    model = str(dualinfer.embedded_model())
    command = [sys.executable, "-m", "dualinfer", "batch", model, str(source), str(out)]
    command += ["--backend", "torch"]
    first = killed(command, out, 20)
    assert first <= killed(command, out, min(first + 20, 300)) <= 300
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"300\s+of\s+300\s+rows;.*\srows/s", done.stderr)
    results = {one["custom_id"]: one for one in read(out)}
    assert len(read(out)) == 300 and results.keys() == {f"r{i}" for i in range(300)}
    bad = [name for name, one in results.items() if one["error"]]
    assert sorted(bad) == ["r107", "r207", "r7"]
    with dualinfer.init_inference(model, backend="torch", dtype="fp32") as engine:
        for i in range(1, 300, 37):
            body = results[f"r{i}"]["response"]["body"]
            expected = engine.generate_text(f"def f{i}(", max_new_tokens=24, do_sample=False)
            assert body["choices"][0]["text"] == expected


def test_the_command_says_what_is_wrong_before_a_model_is_loaded(tmp_path):
    source = write(tmp_path / "in.jsonl", [text_row("a", "x")])
    model = str(dualinfer.embedded_model())

    def refused(*arguments):
        result = CliRunner().invoke(cli.app, ["batch", model, *map(str, arguments)])
        assert result.exit_code == 1
        return " ".join(result.stderr.split())

    assert "is no file" in refused(tmp_path / "gone", tmp_path / "out")
    assert "the folder does not exist" in refused(source, tmp_path / "a" / "b")
    assert "--shard 3/3; expected I/N" in refused(source, tmp_path / "out", "--shard", "3/3")


def test_a_job_without_a_model_is_killed_anywhere(tmp_path):
    """As above, of the files alone, which take no seconds to load."""
    rows = [text_row(f"r{i}", "x") if i % 100 else "{" for i in range(4000)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    script = tmp_path / "job.py"
    script.write_text(inspect.getsource(echo) + JOB)
    command = [sys.executable, str(script), str(source), str(out)]
    first = killed(command, out, 300)
    assert first <= killed(command, out, min(first + 500, 4000)) <= 4000
    subprocess.run(command, check=True)
    results = read(out)
    ids = [one["custom_id"] or one["line"] for one in results]
    assert len(ids) == len(set(ids)) == 4000
    assert sum(isinstance(x, int) for x in ids) == 40
