"""A chat whose answers appear as they are made: `python examples/chat.py MODEL`.

Each line of standard input is a message. MODEL is a folder or hub id with a chat template; without
it the embedded model answers, which knows Python and no conversations.
"""

import sys

import dualinfer

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"

engine = dualinfer.init_inference(sys.argv[1] if len(sys.argv) > 1 else dualinfer.embedded_model())
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
