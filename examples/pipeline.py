"""A pipeline of transformers with an engine in the model's place: `python examples/pipeline.py`.

A model's folder or hub id may follow, and then the backend: torch or jax.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import dualinfer

parser = argparse.ArgumentParser(description="Run a pipeline with and without an engine.")
parser.add_argument("model", nargs="?", default=dualinfer.embedded_model())
parser.add_argument("backend", nargs="?", choices=["torch", "jax"])
asked = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(asked.model)
tokenizer = AutoTokenizer.from_pretrained(asked.model)
pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
options = {"max_new_tokens": 20, "do_sample": False}
before = pipe("def area(width, height):", **options)[0]["generated_text"]

# The one new line. Everything else of the pipeline stays as it is.
pipe.model = dualinfer.init_inference(
    model, backend=asked.backend, dtype="float32", replace_with_kernel_inject=True
)

after = pipe("def area(width, height):", **options)[0]["generated_text"]
print(after)
print("The same text as before." if after == before else f"Before it was: {before}")
