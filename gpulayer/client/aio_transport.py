"""Sends calls with httpx, on trio or asyncio, with every wait bounded and every failure a GpulayerError.

As transport.py does it: a connection is made for each request and closed with it, whatever happens to the task. So
nothing is kept that belongs to one event loop, and no request meets a connection that the daemon is just closing.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import anyio
import httpx
from anyio.abc import SocketAttribute

from gpulayer.client.address import Address, UnixSocket
from gpulayer.client.calls import Call, Feed
from gpulayer.client.exchange import (
    ANSWER_BYTES_MAX,
    ANSWER_SECONDS_MAX,
    CONNECT_SECONDS_MAX,
    NoAnswer,
    connectable,
    document_in,
    encoded,
    error_in,
    no_answer,
    not_connected,
    understanding,
)
from gpulayer.client.stream import Absence, Following, Lines, StreamLost
from gpulayer.client.transport import pid_behind
from gpulayer.client.ways import Way, Ways, wrong_authority
from gpulayer.model.errors import GpulayerError, PermissionDenied, Unreachable

T = TypeVar("T")

# There is no TLS to loopback; httpx would read all of the system's certificates for each transport, which takes 25 ms.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# Far longer than it takes.
_CLOSE_SECONDS_MAX = 1.0


class AsyncTransport:
    """Where requests go, and as whom. Keeps nothing between them, so tasks, and event loops, may share it."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address = address
        self._ways = Ways(address, token)

    async def call(self, call: Call[T]) -> T:
        """What is answered; raises what the answer says went wrong."""
        async with self.open(call, call.path) as response:
            with self._answering():
                content = await _whole(response, ANSWER_SECONDS_MAX)
        document = document_in(content, self.address)
        with understanding(self.address):
            return call.read(document)

    async def follow(self, feed: Feed[T], seconds: float, absence: Absence | None) -> AsyncGenerator[T, None]:
        """What the feed brings; WaitTimeout after `seconds`. The connection is closed with the generator."""
        following = Following(feed, seconds, anyio.current_time(), absence)
        while True:
            try:
                async with self.open(feed, following.path(), following.patience(anyio.current_time())) as response:
                    following.opened(anyio.current_time())
                    async with aclosing(_documents(response, following)) as documents:
                        async for document in documents:
                            following.got(document)
                            with understanding(self.address):
                                read, is_last = feed.read(document), feed.is_last(document)
                            yield read
                            if is_last:
                                return
                return
            except Unreachable as error:
                pause_seconds = following.pause_after(error, anyio.current_time())
            await anyio.sleep(pause_seconds)

    @asynccontextmanager
    async def open(
        self, asked: Call[Any] | Feed[Any], path: str, seconds: float = ANSWER_SECONDS_MAX
    ) -> AsyncGenerator[httpx.Response, None]:
        """Ask, and give the answer once it has begun and is a good one; its connection is closed with the block."""
        async with AsyncExitStack() as stack:
            response = await self._sent(asked, path, seconds, stack)
            if response.status_code >= 400:
                with self._answering():
                    failed = await _whole(response, seconds)
                raise error_in(failed, response.status_code)
            yield response

    async def _sent(
        self, asked: Call[Any] | Feed[Any], path: str, seconds: float, stack: AsyncExitStack
    ) -> httpx.Response:
        """The answer over the first way on which there is one to be had; what it needs is closed with the stack."""
        failed: list[GpulayerError] = []
        for way in self._ways:
            verify = _NO_TLS if way.trust is None else way.context
            request = self._request(way, asked, path)
            try:
                with self._answering(seconds, way), self._socket_name() as uds:
                    transport = await stack.enter_async_context(httpx.AsyncHTTPTransport(uds=uds, verify=verify))
                    response = await transport.handle_async_request(request)
            except NoAnswer:
                raise
            except (PermissionDenied, Unreachable) as error:
                failed.append(error)
                continue
            self._ways.led_there(way)
            return response
        raise self._ways.nowhere(failed)

    async def peer_pid(self) -> int | None:
        """The process behind the socket, where there is one."""
        if not isinstance(self.address, UnixSocket):
            return None
        with self._answering(CONNECT_SECONDS_MAX), connectable(self.address.path) as name:
            async with await anyio.connect_unix(name) as stream:
                return pid_behind(stream.extra(SocketAttribute.raw_socket))

    def _request(self, way: Way, asked: Call[Any] | Feed[Any], path: str) -> httpx.Request:
        headers = way.headers | {"Connection": "close"} | (dict(asked.headers) if isinstance(asked, Call) else {})
        content = None
        if asked.body is not None:
            content = encoded(asked.body)
            headers["Content-Type"] = "application/json"
        # `target`: the path as it is; httpx takes `/v1/jobs/..` for `/v1/`.
        extensions = {"target": path.encode("ascii"), "timeout": {"connect": CONNECT_SECONDS_MAX}}
        base = "http://localhost" if isinstance(way.address, UnixSocket) else str(way.address)
        return httpx.Request(asked.method, base + path, headers=headers, content=content, extensions=extensions)

    @contextmanager
    def _socket_name(self) -> Iterator[str | None]:
        if isinstance(self.address, UnixSocket):
            with connectable(self.address.path) as name:
                yield name
        else:
            yield None

    @contextmanager
    def _answering(self, seconds: float = math.inf, way: Way | None = None) -> Iterator[None]:
        """While the daemon owes an answer; says what it means that there is none."""
        address = self.address if way is None else way.address
        try:
            with anyio.fail_after(seconds):
                yield
        except TimeoutError as error:
            raise no_answer(address, in_time=False) from error
        except (httpx.ConnectError, httpx.ConnectTimeout, OSError) as error:
            if way is not None and way.trust is not None and _is_of_another(error):
                raise wrong_authority(way) from error
            raise not_connected(address, _os_error(error)) from error
        except httpx.TransportError as error:
            raise no_answer(address, in_time=True) from error


async def _documents(response: httpx.Response, following: Following) -> AsyncGenerator[Any, None]:
    """What one connection brings. Ends where the daemon ends it."""
    lines = Lines()
    async with _chunks(response) as chunks:
        while True:
            with anyio.move_on_after(following.patience(anyio.current_time())) as scope:
                try:
                    chunk = await anext(chunks, None)
                except httpx.TransportError as error:
                    raise StreamLost() from error
            if scope.cancelled_caught:
                raise following.silence(anyio.current_time())
            if chunk is None:
                break
            for document in lines.documents(chunk):
                yield document
        for document in lines.rest():
            yield document


async def _whole(response: httpx.Response, seconds: float) -> bytes:
    """The body; `seconds` is for each piece of it, as in transport.py, where the socket bounds each read."""
    parts: list[bytes] = []
    size = 0
    async with _chunks(response) as chunks:
        while True:
            with anyio.fail_after(seconds):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            size += len(chunk)
            if size > ANSWER_BYTES_MAX:
                raise httpx.RemoteProtocolError(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
            parts.append(chunk)
    return b"".join(parts)


@asynccontextmanager
async def _chunks(response: httpx.Response) -> AsyncGenerator[AsyncIterator[bytes], None]:
    """The body as it comes; its connection is closed with the block."""
    chunks = response.aiter_raw()
    try:
        yield chunks
    finally:
        # httpx nests generators that close nothing below them. A connection that is gone ends all of them, now, and not
        # when the garbage collector comes by. Also for a task that was cancelled: nothing of it waits for a peer.
        with anyio.move_on_after(_CLOSE_SECONDS_MAX, shield=True), suppress(httpx.TransportError):
            await response.extensions["network_stream"].aclose()
            async for _ in chunks:
                pass


def _is_of_another(error: BaseException) -> bool:
    """Whether its certificate was issued by somebody else."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLCertVerificationError):
        found = found.__cause__ or found.__context__
    return found is not None


def _os_error(error: BaseException) -> OSError:
    """What the kernel said, below what each library made of it."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno is not None:
            return found
        # trio groups what each address of a host came to; there is one.
        found = found.exceptions[0] if isinstance(found, BaseExceptionGroup) else found.__cause__ or found.__context__
    return OSError("timed out" if isinstance(error, httpx.ConnectTimeout) else str(error))
