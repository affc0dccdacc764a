"""The process: the socket, the signals, the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.serve.app import make_app
from pyfly_cpp.serve.connections import Config, Connection
from pyfly_cpp.serve.logs import Log
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.service import Service
from pyfly_cpp.serve.settings import Settings

_BACKLOG = 512
_LOOK_SECONDS = 0.05
_LAST_SECONDS = 1.0  # in which clients can be told that their requests were given up, and their tasks end


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises ValueError: the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot listen at {host!r}: {error}; give another --host.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use; stop the program that listens there, or give another --port."
            ) from error
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}; give another --host or --port.") from error
    return bound


def serve(
    batch: FlyBatch,
    settings: Settings,
    bound: socket.socket,
    on_start: Callable[[], None] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> bool:
    """Serves until a signal stops it (in the main thread), and then until what runs has ended.

    Args:
        batch: Runs the requests; the caller's to close.
        bound: Where to listen; closed at the end.
        on_start: Called when requests are taken.
        on_wait: Called when Ctrl-C stops it while answers run.

    Returns:
        Whether all has ended. A thread that is tokenizing cannot be interrupted; the batch must not be closed then.
    """
    server = Server(batch, settings, on_start, on_wait)
    asyncio.run(server.serve([bound]))
    return not server.service.reading.is_busy


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed since now."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline


class Server(uvicorn.Server):
    """uvicorn's, which ends in our way: running answers first."""

    def __init__(
        self,
        batch: FlyBatch,
        settings: Settings,
        on_start: Callable[[], None] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """Takes the arguments of `serve`. Setting `should_exit` stops the server."""
        self._settings = settings
        self._on_start = on_start
        self._on_wait = on_wait
        self._is_interrupted = False
        self.service = Service(Model(batch, settings.chat_template), settings, Log(settings.log))
        config = Config(
            make_app(self.service),
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(_LAST_SECONDS),
            backlog=_BACKLOG,
        )
        config.head_seconds = settings.limits.head_seconds
        config.read_seconds = settings.limits.read_seconds
        super().__init__(config)

    async def startup(self, sockets: Any = None) -> None:
        """Listens."""
        self.service.grammars.start()
        await super().startup(sockets=sockets)
        if self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: Any = None) -> None:
        """Lets what runs finish; until then new requests hear why they are refused."""
        self.service.stop()
        if self._is_busy and self._on_wait is not None and self._is_interrupted and not self.force_exit:
            self._on_wait()
        try:
            await self._until_idle(lambda: self.service.is_over or self.force_exit)
            if self._is_busy:
                self.service.give_up()
                await self._until_idle(_after(_LAST_SECONDS))
            if self._is_busy:  # with clients who do not read, or send
                for connection in tuple(self.server_state.connections):
                    connection.transport.abort()
                await self._until_idle(_after(_LAST_SECONDS))
            await super().shutdown(sockets=sockets)
        finally:
            self.service.close()

    @property
    def _is_busy(self) -> bool:
        return self.service.is_busy or bool(self.server_state.tasks)

    async def _until_idle(self, is_enough: Callable[[], bool]) -> None:
        while self._is_busy and not is_enough():
            await asyncio.sleep(_LOOK_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Around serving: SIGINT and SIGTERM end it, a second one immediately; neither is raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._is_interrupted = number == signal.SIGINT
        self.force_exit = self.should_exit
        self.should_exit = True
