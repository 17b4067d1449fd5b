"""A chat whose answers appear as they are made: `python examples/chat.py MODEL`.

Each line of standard input is a message. MODEL is a folder or hub id with a chat template; without
it the embedded model answers, which knows Python and no conversations.
"""

import argparse
import sys

import dualinfer

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"

parser = argparse.ArgumentParser(description="Answer each line of standard input.")
parser.add_argument("model", nargs="?", default=dualinfer.embedded_model())
engine = dualinfer.init_inference(parser.parse_args().model)
if engine.tokenizer.chat_template is None:
    engine.tokenizer.chat_template = TEMPLATE

messages = [{"role": "system", "content": "Be brief."}]
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    answer = ""
    for piece in engine.stream_chat(messages, max_new_tokens=40):
        print(piece, end="", flush=True)
        answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})
engine.close()
