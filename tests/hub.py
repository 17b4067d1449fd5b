"""A hub on the loopback: the routes that huggingface_hub asks, over repositories in memory."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

COMMIT = "1" * 40


class Hub:
    """`models` are {name: {file: bytes}}; `requests` every method and path that was asked for."""

    def __init__(self):
        self.models, self.requests = {}, []
        self.gated, self.broken, self.tokens = set(), set(), set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name, folder):
        """A repository of a folder's files."""
        files = (path for path in folder.rglob("*") if path.is_file())
        self.models[name] = {str(p.relative_to(folder)): p.read_bytes() for p in files}

    def fetched(self):
        """The files whose content was asked for, in order."""
        paths = [path for method, path in self.requests if method == "GET"]
        return [path.split("/", 5)[-1] for path in paths if "/resolve/" in path]

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path):
        """Status, headers and body of a path."""
        name = next((n for n in self.models if n in path), None)
        if name is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        files, rest = self.models[name], path.split(name, 1)[1].strip("/").split("/")
        where = rest[1] if len(rest) > 1 else "main"
        if where not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if rest[0] == "resolve":
            if name in self.gated:
                return 403, {"X-Error-Code": "GatedRepo"}, b""
            file = "/".join(rest[2:])
            if file not in files:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
            etag = hashlib.sha256(files[file]).hexdigest()
            return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, files[file]
        if rest[0] == "tree":
            found = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in files.items()
            ]
        else:
            found = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path))
                hub.tokens.add(self.headers.get("Authorization"))
                status, headers, body = hub._answer(path)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        return Handler


def use_hub(patch, url, cache, offline=False, token=None):
    """Set huggingface_hub up as its variables would, had they been set before its import."""
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
    patch.setenv("HF_TOKEN", token or "")
