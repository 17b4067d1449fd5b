"""A server of OpenAI's completions that makes no text: it says when it writes what, as it is told.

`python tests/scripted_server.py PORT` runs it for another client to measure:

    aiperf profile --model scripted --tokenizer dualinfer/embedded --url 127.0.0.1:PORT \
        --endpoint-type completions --streaming --concurrency 16 --request-count 200 \
        --synthetic-input-tokens-mean 64 --output-tokens-mean 32 --extra-inputs ignore_eos:true \
        --use-server-token-count --ui none
    dualinfer bench serve --url http://127.0.0.1:PORT --requests 200 --concurrency 16 \
        --input-len 64 --output-len 32
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

FIRST, BETWEEN = 0.2, 0.05  # seconds


@dataclass
class Served:
    """What the server did for one request, by time.perf_counter()."""

    begun: float
    body: dict
    written: list[float] = field(default_factory=list)


class ScriptedServer:
    """Answers each request as `script(number, body)` says: an iterable of (delay, bytes or None).

    Bytes are written as a chunk of the answer, None ends the connection.
    """

    def __init__(self, script=None):
        self.script = script or self.steady
        self.served = []
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(x.split(": ", 1) for x in head.decode().split("\r\n")[1:] if x)
                sizes = [v for k, v in fields.items() if k.lower() == "content-length"]
                body = json.loads(await reader.readexactly(int(sizes[0])) if sizes else b"{}")
                if not body:
                    answer = json.dumps({"data": [{"id": "scripted"}]}).encode()
                    length = f"Content-Length: {len(answer)}\r\n\r\n".encode()
                    writer.write(b"HTTP/1.1 200 OK\r\n" + length + answer)
                    continue
                served = Served(time.perf_counter(), body)
                self.served.append(served)
                is_first = True
                for delay, data in self.script(len(self.served) - 1, body):
                    await asyncio.sleep(delay)
                    if data is None:
                        return
                    if isinstance(data, int):  # a status
                        said = b'{"error": "no"}'
                        size = f"Content-Length: {len(said)}\r\n\r\n".encode()
                        writer.write(f"HTTP/1.1 {data} Not\r\n".encode() + size + said)
                        is_first = None
                        break
                    if is_first:
                        kind = b"Content-Type: text/event-stream\r\n"
                        writer.write(
                            b"HTTP/1.1 200 OK\r\n" + kind + b"Transfer-Encoding: chunked\r\n\r\n"
                        )
                        is_first = False
                    served.written.append(time.perf_counter())
                    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                if is_first is not None:
                    writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def steady(self, number, body):
        """A token at a time, each after the same delay."""
        for i in range(body["max_tokens"]):
            yield FIRST if i == 0 else BETWEEN, token()
        yield 0, ending(body)


def token(count=1):
    """An event with a choice."""
    return event({"choices": [{"index": 0, "text": " x" * count, "finish_reason": None}]})


def event(content):
    content = {"id": "1", "object": "text_completion", "created": 1, "model": "m"} | content
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def ending(body, completion=None):
    """The last events of a stream."""
    prompt = body["prompt"]
    made = body["max_tokens"] if completion is None else completion
    usage = {"prompt_tokens": len(prompt), "completion_tokens": made}
    return event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


async def _main(port):
    server = await asyncio.start_server(ScriptedServer()._serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
