"""Connections whose clients may be slow: with the head of a request, or with what they are sent."""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST = 2**16
"""Bytes that a client must take in its time, if there are more."""


class Config(uvicorn.Config):
    """uvicorn's, with the limits of a connection."""

    head_seconds = 0.0
    """From the first byte (of a new connection: from its beginning) to the end of a request's head."""
    read_seconds = 0.0
    """In which a client must take 64 KiB, or all that there is."""


class Connection(H11Protocol):
    """A connection, which ends if its client is too slow."""

    _awaited: asyncio.TimerHandle | None = None  # a head
    _unread: asyncio.TimerHandle | None = None
    _n_unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the time for the head of the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` tells of anything that the system does not take
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Begins the time for the head of a later request, or ends that for one."""
        before = self.cycle
        super().data_received(data)
        is_between = self.cycle is None or self.cycle.response_complete
        if self.cycle is not before or not is_between:
            self._end_head()
        elif self._awaited is None:
            self._await_head()

    def pause_writing(self) -> None:
        """Begins the time for the client to read."""
        super().pause_writing()
        if self._unread is None:
            self._await_reader()

    def resume_writing(self) -> None:
        """Ends it: everything was read."""
        super().resume_writing()
        self._end_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all times."""
        self._end_head()
        self._end_reader()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        assert isinstance(self.config, Config)
        self._awaited = self.loop.call_later(self.config.head_seconds, self.transport.abort)

    def _end_head(self) -> None:
        if self._awaited is not None:
            self._awaited.cancel()
            self._awaited = None

    def _await_reader(self) -> None:
        assert isinstance(self.config, Config)
        self._n_unread = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.config.read_seconds, self._look_at_reader)

    def _end_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() > self._n_unread - _LEAST:
            self.transport.abort()
        else:
            self._await_reader()
