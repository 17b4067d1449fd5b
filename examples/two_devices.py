"""One model on two devices with torch: `dualinfer launch --tp 2 examples/two_devices.py`.

Each process takes a GPU, or they share the CPU where there is none. All make the same calls and get
the same results.
"""

import argparse
import os

import dualinfer

argparse.ArgumentParser(description="Continue a text on two devices.").parse_args()

with dualinfer.init_inference(
    dualinfer.embedded_model(),
    backend="torch",
    tensor_parallel={"tp_size": 2},
) as engine:
    text = engine.generate_text("import os\n", max_new_tokens=20)
    if os.environ.get("RANK", "0") == "0":
        print(text)
        print(repr(engine))
