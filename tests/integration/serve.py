"""A service for tests: HTTP on $HOST:$PORT, one request at a time.

Asked for /exit/N it ends with N, for /pid, /run and /env/NAME it says what it is, for /say/TEXT it prints. Options:
--host and --port instead of the variables; --delay SECONDS before it listens; --say TEXT at its start.
"""

import argparse
import os
import socket
import sys
import time


def answer_to(path: str) -> bytes:
    what, _, argument = path.strip("/").partition("/")
    if what == "pid":
        return str(os.getpid()).encode()
    if what == "run":
        return os.environ["GPULAYER_RUN_ID"].encode()
    if what == "env":
        return os.environ.get(argument, "").encode()
    if what == "say":
        print(argument, flush=True)
    return b"hello"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default=os.environ.get("HOST"))
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT", "0")))
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--say", default="")
    options = parser.parse_args()
    if options.say:
        print(options.say, flush=True)
    time.sleep(options.delay)
    listener = socket.create_server((options.host, options.port))
    while True:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(4096)
            if not request:
                continue  # the daemon's look at the port
            path = request.split(b" ", 2)[1].decode()
            body = answer_to(path)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if path.startswith("/exit/"):
            print(f"asked to exit with {path[6:]}", file=sys.stderr, flush=True)
            os._exit(int(path[6:]))


main()
