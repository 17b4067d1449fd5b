"""A script for DeepSpeed-Inference after its move: `python examples/from_deepspeed.py`.

What it was before stands in the comments. A model's folder or hub id may follow.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dualinfer  # import deepspeed

parser = argparse.ArgumentParser(description="Generate, as a script for DeepSpeed did.")
parser.add_argument("model", nargs="?", default=dualinfer.embedded_model())
name = parser.parse_args().model
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

engine = dualinfer.init_inference(  # engine = deepspeed.init_inference(
    model,
    tensor_parallel={"tp_size": 1},  # mp_size=1 still works, with a DeprecationWarning
    dtype=torch.float16 if torch.cuda.is_available() else torch.float32,
    replace_with_kernel_inject=True,
    max_out_tokens=256,
)

inputs = tokenizer("import os\n", return_tensors="pt")
ids = engine.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(ids[0]))
print(repr(engine))
