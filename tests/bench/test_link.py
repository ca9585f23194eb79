"""A way to a server on which bytes wait as on a network."""

from __future__ import annotations

import socket
import threading
import time

from stillframe.bench.link import Link

SENT = bytes(300_000)


def test_what_is_sent_by_all_connections_together_takes_as_long_as_the_link_is_slow():
    server = socket.create_server(("127.0.0.1", 0))
    link = Link(server.getsockname()[1], bytes_per_second=1_000_000)
    got = []

    def take():
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as source:
            got.append(len(source.read(len(SENT))))
            connection.sendall(b"done")

    def send():
        with socket.create_connection(("127.0.0.1", link.port)) as connection:
            connection.sendall(SENT)
            assert connection.recv(4) == b"done"

    threads = [threading.Thread(target=each) for each in (take, take, send, send)]
    begun = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    link.close()
    server.close()

    assert got == [len(SENT)] * 2
    assert time.monotonic() - begun >= 2 * len(SENT) / 1_000_000 - 0.07, "but for the last piece"
