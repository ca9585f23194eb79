"""How fast batches travel between two slots, beside a bare socket and Arrow Flight in the same run.

    python bench/network.py [--seconds 3] [--rounds 3] [--no-flight]

Two processes over loopback. 'bare socket' sends bytes of the same size, encoded beforehand, and
reads them into one buffer that is never looked at: the most this machine's loopback can give to
Python. The ratios are of the medians of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import pyarrow as pa

from stillframe.ids import Attempt, SlotIndex
from stillframe.runtime.elements import EndOfRecords
from stillframe.runtime.network import Network
from stillframe.wire import Address, address_of, listen

WINDOW_BYTES = 4 * 1024 * 1024
LIMIT_SECONDS = 60.0
SECRET = b"for the benchmark only"
SENDER, RECEIVER = SlotIndex(0), SlotIndex(1)


def clicks(rows: int, *, is_dictionary: bool = False) -> pa.RecordBatch:
    """A string of 18 characters from a thousand, and a number."""
    names = pa.array([f"application-{n:06d}" for n in range(1_000)])
    picks = pa.array(np.random.default_rng(1).integers(0, 1_000, rows).astype(np.int32))
    column = pa.DictionaryArray.from_arrays(picks, names) if is_dictionary else names.take(picks)
    return pa.record_batch({"app": column, "n": np.arange(rows)})


def open_network(slot: SlotIndex, wake: Callable[[], None]) -> Network:
    return Network(
        job="bench", host="127.0.0.1", secret=SECRET, attempt=Attempt(1), slot=slot,
        buffer_bytes_max=WINDOW_BYTES, wake=wake,
    )  # fmt: skip


# --- the receivers, each in a process of its own: announce an address, receive until the end


def receive_with_network(pipe: Pipe) -> None:
    woken = threading.Event()
    network = open_network(RECEIVER, woken.set)
    arriving = network.input(SENDER, 1)
    pipe.send(network.address)
    network.connect({SENDER: network.address}, LIMIT_SECONDS)
    rows = 0
    while True:
        if arriving.is_empty():
            assert woken.wait(LIMIT_SECONDS)
            assert network.failure() is None, network.failure()
            woken.clear()
            continue
        element = arriving.take()
        if isinstance(element, EndOfRecords):
            break
        rows += element.num_rows
    pipe.send(rows)
    network.close(LIMIT_SECONDS)


def receive_with_bare_socket(pipe: Pipe) -> None:
    with listen("127.0.0.1") as listener:
        pipe.send(address_of(listener))
        sock, _ = listener.accept()
    received, buffer = 0, bytearray(4 * 1024 * 1024)
    with sock:
        while count := sock.recv_into(buffer):
            received += count
    pipe.send(received)


def receive_with_flight(pipe: Pipe) -> None:
    from pyarrow import flight

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            rows = 0
            for chunk in reader:
                rows += chunk.data.num_rows
            pipe.send(rows)

    server = Server("grpc://127.0.0.1:0")
    pipe.send(Address("127.0.0.1", server.port))
    pipe.recv()
    server.shutdown()


# --- the senders: send for some seconds, answer how many batches and how long it took until the
#     receiver had them all


def send_with_network(batch: pa.RecordBatch, seconds: float, pipe: Pipe) -> tuple[int, float]:
    woken = threading.Event()
    network = open_network(SENDER, woken.set)
    output = network.output(RECEIVER, 1)
    network.connect({RECEIVER: pipe.recv()}, LIMIT_SECONDS)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        if output.has_room():
            output.send(batch)
            count += 1
        else:
            assert woken.wait(LIMIT_SECONDS)
            assert network.failure() is None, network.failure()
            woken.clear()
    output.send(EndOfRecords())
    assert pipe.recv() == count * batch.num_rows
    elapsed_seconds = time.perf_counter() - start
    network.close(LIMIT_SECONDS)
    return count, elapsed_seconds


def send_with_bare_socket(batch: pa.RecordBatch, seconds: float, pipe: Pipe) -> tuple[int, float]:
    address = pipe.recv()
    data = bytes(batch.nbytes)
    with socket.create_connection((address.host, address.port)) as sock:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            sock.sendall(data)
            count += 1
        sock.shutdown(socket.SHUT_WR)
        assert pipe.recv() == count * batch.nbytes
        return count, time.perf_counter() - start


def send_with_flight(batch: pa.RecordBatch, seconds: float, pipe: Pipe) -> tuple[int, float]:
    from pyarrow import flight

    client = flight.connect(f"grpc://{pipe.recv()}")
    descriptor = flight.FlightDescriptor.for_path("bench")
    writer, _ = client.do_put(descriptor, batch.schema)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        writer.write_batch(batch)
        count += 1
    writer.close()
    assert pipe.recv() == count * batch.num_rows
    elapsed_seconds = time.perf_counter() - start
    client.close()
    pipe.send("done")
    return count, elapsed_seconds


WAYS = {
    "bare socket": (send_with_bare_socket, receive_with_bare_socket),
    "stillframe": (send_with_network, receive_with_network),
    "arrow flight": (send_with_flight, receive_with_flight),
}


def run_once(way: str, batch: pa.RecordBatch, seconds: float) -> float:
    """Batches per second."""
    send, receive = WAYS[way]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,))
    process.start()
    count, elapsed_seconds = send(batch, seconds, ours)
    process.join(LIMIT_SECONDS)
    return count / elapsed_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each run sends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-flight", action="store_true")
    arguments = parser.parse_args()
    ways = [way for way in WAYS if not (arguments.no_flight and way == "arrow flight")]
    cases = {
        "64k rows, string + int64": clicks(65_536),
        "1k rows, string + int64": clicks(1_024),
        "64k rows, dictionary + int64": clicks(65_536, is_dictionary=True),
    }
    print(f"{'':30}{'':14}{'MB/s':>8}{'M rec/s':>9}{'us/batch':>10}{'of bare':>9}")
    for name, batch in cases.items():
        # Rounds are interleaved, so that a busy moment of the machine hits all ways alike.
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way in ways:
                rates[way].append(run_once(way, batch, arguments.seconds))
        bare = statistics.median(rates["bare socket"])
        for way in ways:
            rate = statistics.median(rates[way])
            print(
                f"{name:30}{way:14}{rate * batch.nbytes / 1e6:8.0f}"
                f"{rate * batch.num_rows / 1e6:9.1f}{1e6 / rate:10.1f}{rate / bare:9.2f}"
            )


if __name__ == "__main__":
    main()
