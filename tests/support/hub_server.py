"""A hub on 127.0.0.1 that holds one dataset of Parquet files, and breaks connections off where it is told to."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

NAME, SUBSET = "made/up", "sample"
COMMIT = "a" * 40
README = f"---\nconfigs:\n- config_name: {SUBSET}\n  data_files:\n  - split: train\n    path: {SUBSET}/*\n---\n"


def file_name(index: int) -> str:
    return f"{SUBSET}/train-{index:05d}.parquet"


class Hub:
    """The hub, while the block runs.

    cuts: how often a file's bytes are broken off in the middle before they come whole. asked: how often each file was.
    gone: no question is answered.
    """

    def __init__(self, files: list[list[str]]):
        self.files = {file_name(index): _parquet(texts) for index, texts in enumerate(files)}
        self.files["README.md"] = README.encode()
        self.cuts: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.gone = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Answer, self))

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


def use(address: str, cache: Path) -> None:
    """Let this process take the hub at `address` for the only one, and give it up soon."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants, hf_api

    constants.ENDPOINT = datasets.config.HF_ENDPOINT = hf_api.api.endpoint = address
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_CACHE = datasets.config.HF_DATASETS_CACHE = str(cache)
    datasets.config.STREAMING_READ_MAX_RETRIES = 2
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0.1
    backoff = huggingface_hub.utils.http_backoff
    huggingface_hub.hf_file_system.http_backoff = partial(backoff, max_retries=1, base_wait_time=0.1)


def _parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), file, row_group_size=5)
    return file.getvalue()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *given):
        self.hub = hub
        super().__init__(*given)

    def log_message(self, *_) -> None:
        pass

    def answer(self) -> None:
        if self.hub.gone:
            self.close_connection = True
            return None
        path = unquote(self.path.partition("?")[0])
        if path == "/":
            return self.json({})
        if found := re.match(rf"/datasets/{NAME}/resolve/[^/]+/(.*)$", path):
            return self.file(found[1]) if found[1] in self.hub.files else self.nothing()
        if re.match(rf"/api/datasets/{NAME}(/revision/[^/]+)?$", path):
            listed = [{"rfilename": name} for name in self.hub.files]
            return self.json({"id": NAME, "sha": COMMIT, "siblings": listed, "tags": [], "downloads": 0, "likes": 0})
        if found := re.match(rf"/api/datasets/{NAME}/tree/[^/]+/?(.*)$", path):
            return self.json([entry for entry in self.entries() if entry["path"].startswith(found[1])])
        return self.nothing()

    do_GET = do_HEAD = answer

    def entries(self) -> list[dict]:
        return [
            {"type": "directory", "path": SUBSET, "oid": COMMIT},
            *({"type": "file", "path": name, "size": len(x), "oid": _oid(x)} for name, x in self.hub.files.items()),
        ]

    def nothing(self) -> None:
        self.body(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def json(self, data) -> None:
        self.body(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def file(self, name: str) -> None:
        content, status = self.hub.files[name], 200
        told = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT}
        if asked := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            told["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
            content, status = content[first : last + 1], 206
        self.hub.asked[name] += self.command == "GET"
        cut = self.command == "GET" and self.hub.cuts[name] > 0
        self.hub.cuts[name] -= cut
        self.body(status, content, told, len(content) // 2 if cut else None)

    def body(self, status: int, content: bytes, told: dict[str, str], until: int | None = None) -> None:
        self.send_response(status)
        for name, value in (told | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:until])
        self.close_connection = until is not None


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
