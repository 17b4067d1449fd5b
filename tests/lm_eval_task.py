"""lm-evaluation-harness over three small tasks, by its own model of HF and by ours.

    python -m tests.lm_eval_task [torch|jax]

It needs `lm-eval`, which the test suite does not install. Figures are printed side by side; the
exit code is 1 where a likelihood differs by more than 1e-4 of it, or a text does.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import dualinfer
from dualinfer.evaluation import lm_eval_model

ROWS = [
    {
        "context": f"def f{i}(a, b):\n    return",
        "choices": [" a", " a + b", " None", "\n"],
        "gold": i % 4,
    }
    for i in range(24)
]
COMMON = {"dataset_path": "json", "test_split": "test"}
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": " a",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main() -> int:
    backend = sys.argv[1] if len(sys.argv) > 1 else "torch"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        for task, fields in TASKS.items():
            content = {"task": task, **COMMON, **files, **fields}
            (folder / f"{task}.yaml").write_text(json.dumps(content))  # JSON is YAML
        manager = TaskManager(include_path=name, include_defaults=False)
        model = str(dualinfer.embedded_model())
        with dualinfer.init_inference(model, backend=backend, dtype="fp32") as engine:
            models = {
                "hf": HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=8),
                backend: lm_eval_model(engine),
            }
            found = {
                name: lm_eval.simple_evaluate(
                    model=lm, tasks=list(TASKS), task_manager=manager, log_samples=True
                )
                for name, lm in models.items()
            }
    differing = 0
    for task in TASKS:
        for name, result in found.items():
            metrics = {k: v for k, v in result["results"][task].items() if isinstance(v, float)}
            print(task, name, metrics)
        pairs = zip(*(result["samples"][task] for result in found.values()), strict=True)
        for one, other in pairs:
            for a, b in zip(flat(one["resps"]), flat(other["resps"]), strict=True):
                same = abs(a - b) <= 1e-4 * max(1.0, abs(a)) if isinstance(a, float) else a == b
                if not same:
                    print("differs:", task, a, b)
                differing += not same
    print(f"{differing} differ")
    return int(differing > 0)


def flat(value):
    """The numbers, flags and texts of nested lists."""
    if isinstance(value, list | tuple):
        return [one for part in value for one in flat(part)]
    try:
        return [float(value)] if not isinstance(value, bool) else [value]
    except (TypeError, ValueError):
        return [value]


if __name__ == "__main__":
    sys.exit(main())
