"""Chandy and Lamport's snapshot of three processes that send each other money.

    process 1 ──▶ process 2      M12 and back M21
    process 1 ──▶ process 3      M13 and back M31
    process 2 ──▶ process 3      M23

Process 1 begins: it records its state and sends a marker on each of its channels. A process that
gets its first marker does the same. On every other channel it records what arrives between its own
snapshot and the marker on that channel: that was sent before the sender's snapshot, so it belongs
to neither of the two states. States and channels together hold all the money, at every moment.

The processes are real ones and their channels are pipes. What a marker means is decided by the code
that decides it for barriers that overtake records (stillframe/protocol/alignment.py).

    python examples/e6_chandy_lamport.py
"""

import multiprocessing
from typing import NamedTuple

from stillframe.ids import ChannelIndex, CheckpointId
from stillframe.protocol.alignment import BarrierAligner, TakeSnapshot
from stillframe.protocol.recording import StopRecording

CHANNELS = ((1, 2), (1, 3), (2, 3), (2, 1), (3, 1))
MONEY = {1: 100, 2: 200, 3: 300}
MARKER = "marker"
SNAPSHOT = CheckpointId(1)
BEGIN = ChannelIndex(0)
"""On which process 1 is told to begin."""

SCRIPTS = {
    1: (
        *("send 10 to 2", "send 20 to 3", "begin", "send 5 to 2"),
        *("receive from 2", "receive from 2", "receive from 3", "receive from 3"),
    ),
    2: (
        *("send 30 to 1", "send 40 to 3", "receive from 1", "receive from 1", "send 2 to 3"),
        *("receive from 1",),
    ),
    3: (
        *("send 7 to 1", "receive from 1", "receive from 1"),
        *("receive from 2", "receive from 2", "receive from 2"),
    ),
}
"""What each process does. Channels keep their order, so the result is always the same."""


class Part(NamedTuple):
    """What one process contributes to the snapshot, and what it did."""

    state: int | None
    channels: dict[int, list[int]]
    """For each sender: what was under way from there."""
    log: list[str]


class Process:
    """One process and its money; `send` has a function for each process that it can send to."""

    def __init__(self, name, send):
        senders = [source for source, target in CHANNELS if target == name]
        channels = [BEGIN, *senders] if name == 1 else senders
        self.name, self.send, self.money = name, send, MONEY[name]
        self.state, self.under_way, self.log = None, {sender: [] for sender in senders}, []
        self._recorded = set()
        self._aligner = BarrierAligner(map(ChannelIndex, channels))

    def pay(self, amount, target):
        self.money -= amount
        self.send[target](amount)
        self.log.append(f"sends {amount} to process {target}")

    def begin(self):
        self._on_marker(BEGIN)

    def receive(self, message, sender):
        if message == MARKER:
            self.log.append(f"receives M{sender}{self.name}")
            self._on_marker(ChannelIndex(sender))
            return
        self.money += message
        self.log.append(f"receives {message} from process {sender}")
        if sender in self._recorded:
            self.under_way[sender].append(message)
            self.log.append(f"records {message} on channel {sender}{self.name}")

    def part(self):
        return Part(self.state, self.under_way, self.log)

    def _on_marker(self, channel):
        for instruction in self._aligner.on_barrier(channel, SNAPSHOT, overtakes=True):
            match instruction:
                case TakeSnapshot(recorded=channels):
                    self._recorded = set(channels)
                    self._take_snapshot()
                case StopRecording(channel=ended):
                    self._recorded.remove(ended)

    def _take_snapshot(self):
        self.state = self.money
        markers = " and ".join(f"M{self.name}{target}" for target in self.send)
        self.log.append(f"records its state {self.state}, sends {markers}")
        for send in self.send.values():
            send(MARKER)


def live(name, inputs, outputs, result):
    """The life of a process of the operating system: it follows its script."""
    process = Process(name, {target: pipe.send for target, pipe in outputs.items()})
    for step in SCRIPTS[name]:
        match step.split():
            case "send", amount, "to", target:
                process.pay(int(amount), int(target))
            case "receive", "from", sender:
                process.receive(inputs[int(sender)].recv(), int(sender))
            case ["begin"]:
                process.begin()
    result.send(process.part())


def run():
    """The part of each process."""
    context = multiprocessing.get_context("spawn")
    pipes = {channel: context.Pipe(duplex=False) for channel in CHANNELS}
    results, processes = {}, []
    for name in MONEY:
        results[name], result = context.Pipe(duplex=False)
        inputs = {s: reader for (s, t), (reader, _) in pipes.items() if t == name}
        outputs = {t: writer for (s, t), (_, writer) in pipes.items() if s == name}
        processes.append(
            context.Process(target=live, args=(name, inputs, outputs, result), daemon=True)
        )
        processes[-1].start()
        result.close()  # so that `recv` raises if the process dies
    parts = {name: result.recv() for name, result in results.items()}
    for process in processes:
        process.join()
    return parts


def in_words(parts):
    """States and channels, and the money in both together."""
    states = {f"process {name}": part.state for name, part in parts.items()}
    channels = {f"channel {s}{t}": sum(parts[t].channels[s]) for s, t in sorted(CHANNELS)}
    amounts = ", ".join(f"{where} = {amount}" for where, amount in (states | channels).items())
    return f"snapshot: {amounts}; together {sum(states.values()) + sum(channels.values())}"


def tell(parts, say=print):
    """What each process did, and the snapshot."""
    for name, part in parts.items():
        say("\n  ".join([f"process {name}", *part.log]))
    say(in_words(parts))


if __name__ == "__main__":
    tell(run())
