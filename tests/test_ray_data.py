"""Batches by Ray Data: two real workers, each with the model; rows that fail; jobs that go on."""

import json
from typing import Any

import numpy as np
import pytest

import dualinfer
from dualinfer.errors import ArgumentError
from dualinfer.ray_data import BatchActor
from dualinfer.serving.http.batch import BatchFileError

from .recipes import RECIPES


def line(name, prompt, **body):
    fields = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0} | body
    row = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": fields}
    return json.dumps(row)


def results_in(folder):
    texts = [path.read_text() for path in folder.iterdir()]
    return [json.loads(one) for text in texts for one in text.splitlines()]


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def model(request):
    return {"model": dualinfer.embedded_model(), "backend": request.param, "dtype": "fp32"}


def test_an_actor_answers_each_row_once_and_in_its_place(model, tmp_path):
    lines = [line(f"r{i}", f"def f{i}(") for i in range(6)]
    lines[3:3] = ["{", json.dumps({"url": "x"}), line("old", "x", best_of=2)]
    how = model | {"reserve": {"slots": 4, "tokens": 64}, "output": tmp_path / "out"}
    batch = {"text": np.array(lines, object), "weight": np.arange(9)}
    first = BatchActor(**how)
    found = first({name: column[:7] for name, column in batch.items()})
    assert found["weight"].tolist() == list(range(7)) and "text" not in found
    assert found["custom_id"].tolist() == ["r0", "r1", "r2", None, None, "old", "r3"]
    assert found["failed"].tolist() == [False] * 3 + [True] * 3 + [False]
    codes = [json.loads(text)["error"] for text in found["result"][3:5]]
    assert [one["code"] for one in codes] == ["invalid_json", "missing_custom_id"]
    assert json.loads(found["result"][6])["response"]["body"]["choices"][0]["text"]
    again = BatchActor(**how)  # as in a worker that Ray has started again
    left = again(batch)
    assert left["weight"].tolist() == [7, 8] and left["custom_id"].tolist() == ["r4", "r5"]
    assert len(again(batch)["weight"]) == 0
    rows = results_in(tmp_path / "out")
    assert len(rows) == 9 and {row["custom_id"] for row in rows} == {
        *found["custom_id"],
        "r4",
        "r5",
    }


def test_what_is_no_batch_is_refused(model, tmp_path):
    if model["backend"] == "torch":
        actor = BatchActor(**model, column="request", reserve={"slots": 1, "tokens": 16})
        with pytest.raises(ArgumentError, match="no column 'request', but text"):
            actor({"text": np.array(["{}"], object)})
        (tmp_path / "a.results.jsonl").write_text('{"other": 1}\n')
        with pytest.raises(BatchFileError, match="no results of a batch"):
            BatchActor(**model, output=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_the_workers_of_the_recipe_share_a_file_and_a_second_run_asks_what_is_left(
    tmp_path, monkeypatch, capsys
):
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "dualinfer[ray]".')
    pytest.importorskip("pyarrow", reason='pyarrow is missing: pip install "dualinfer[ray]".')
    monkeypatch.chdir(tmp_path)
    ((_, _, code),) = RECIPES["Ray Data"]
    names: dict[str, Any] = {}
    ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        exec(compile(code, "Ray Data", "exec"), names)
        assert capsys.readouterr().out.endswith("30 answers\n")
        lines = [line(f"r{i}", f"def f{i}(") for i in range(40)]
        lines[37] = "no JSON"
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        data = ray.data.read_text("in.jsonl").repartition(2)
        one = ray.data.ActorPoolStrategy(size=1)
        second = data.map_batches(
            BatchActor, fn_constructor_kwargs=names["model"], compute=one, batch_size=5
        ).take_all()
    finally:
        ray.shutdown()
    assert len(names["made"]) == 30
    left = {f"r{i}" for i in range(30, 40)} - {"r37"}
    assert {row["custom_id"] for row in second if not row["failed"]} == left
    assert len(second) == 10
    rows = {row["custom_id"]: row for row in results_in(tmp_path / "results")}
    assert len(results_in(tmp_path / "results")) == 40 and len(rows) == 40
    with dualinfer.init_inference(dualinfer.embedded_model(), backend="torch") as engine:
        for i in (0, 13, 29, 30, 39):
            text = rows[f"r{i}"]["response"]["body"]["choices"][0]["text"]
            assert text == engine.generate_text(f"def f{i}(", max_new_tokens=4, do_sample=False)
