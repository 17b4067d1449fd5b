"""A pipeline of transformers with an engine in the model's place: `python examples/pipeline.py`.

A model's folder or hub id may follow, and then the backend: torch or jax.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import dualinfer

name = sys.argv[1] if len(sys.argv) > 1 else dualinfer.embedded_model()
backend = sys.argv[2] if len(sys.argv) > 2 else None

model = AutoModelForCausalLM.from_pretrained(name)
pipe = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(name))
options = {"max_new_tokens": 20, "do_sample": False}
before = pipe("def area(width, height):", **options)[0]["generated_text"]

# The one new line. Everything else of the pipeline stays as it is.
pipe.model = dualinfer.init_inference(
    model, backend=backend, dtype="float32", replace_with_kernel_inject=True
)

after = pipe("def area(width, height):", **options)[0]["generated_text"]
print(after)
print("The same text as before." if after == before else f"Before it was: {before}")
