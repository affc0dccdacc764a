"""A server that says its version and its devices as llama.cpp's rpc-server does, and nothing more."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

HELLO, DEVICE_COUNT, DEVICE_MEMORY = 14, 15, 11


@contextlib.contextmanager
def fake_rpc_server(version=(7, 0, 0), n_devices=2):
    """Runs one; its address. Each device has 3 GiB of 4 free."""

    def serve(client):
        stream = client.makefile("rb")
        answers = {
            HELLO: bytes(version).ljust(28, b"\0"),
            DEVICE_COUNT: struct.pack("<I", n_devices),
            DEVICE_MEMORY: struct.pack("<QQ", 3 << 30, 4 << 30),
        }
        while header := stream.read(9):
            command, n = struct.unpack("<BQ", header)
            stream.read(n)
            client.sendall(struct.pack("<Q", len(answers[command])) + answers[command])

    def accept():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError, KeyError):
                    serve(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
