"""What does a model do when a call of its tool gets no answer? A script plays it.

A model wants a number of equal jobs. It sees only what it is told, and calls until it
was told of so many. One kind counts the jobs it was told of, another its answered calls.
A script is such a model and some faults, which strike the first attempts.

`python -m tests.caller.conversations` takes one turn, and kills itself at a step of it.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import re
import runpy
import signal
import sqlite3
import sys
import threading
import types
import uuid
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import retry_lab
from tests.caller import runner
from tests.watch import watched

FAULTS = ("none", "before_commit", "after_commit")
REJECTIONS = ("busy", "conflict")
ONE_AT_A_TIME = threading.Lock()
PATIENCE = 7  # turns: four silences and three answers, and then a model gives up


class Died(BaseException):
    """A stand-in for the death of an attempt's process."""


def die_here(*call: str) -> None:
    """Make an attempt that ends where its process would die; many a minute are made."""

    def exit_here(status: int) -> None:
        raise Died(status)

    with ONE_AT_A_TIME, mock.patch("os._exit", exit_here), suppress(Died):
        retry_lab.create_job(*call)


class Service:
    """A service whose attempts meet these faults, one after the other."""

    def __init__(self, database: str, *faults: str, runner: object = runner) -> None:
        self.database, self.faults, self.runner = database, faults, runner
        self.die = die_here
        self.answered = set()  # keys whose answer has reached this process
        self.log = Path(f"{database}.log")  # of keys, for a killed runner's count too

    def start_over(self) -> None:
        """Begin with an empty database."""
        for left in self.log.parent.glob(f"{Path(self.database).name}*"):
            left.unlink()
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.executescript(f"BEGIN; {retry_lab.SCHEMA} COMMIT;")
        self.log.touch()

    def sent(self) -> "list[str]":
        """Return the key of each attempt there was."""
        return self.log.read_text().split()

    def rows(self, what: str) -> list:
        """Return one column of a table."""
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            return [row[0] for row in connection.execute(f"SELECT {what} ORDER BY 1")]

    def send(self, key: str, request: str) -> int:
        """Make an attempt; return its answer, or raise."""
        place = len(self.sent())
        with open(self.log, "a") as log:
            log.write(f"{key}\n")
        fault = self.faults[place] if place < len(self.faults) else "none"
        if fault == "busy":
            raise self.runner.Rejected("429")
        if fault == "conflict" and key in self.rows("key FROM receipts"):
            raise self.runner.Conflict("a field was added")
        if fault in ("before_commit", "after_commit"):
            self.die(self.database, key, request, fault)
            raise TimeoutError(key)
        job = retry_lab.create_job(self.database, key, request)
        self.answered.add(key)
        return job


def untrue(service: Service, calls: list, owners: "dict[str, str]") -> "list[str]":
    """Return the texts of a turn's notes that the service's database belies right now.

    `owners` has the call that was told of a job as its own, for each job so far.
    """
    jobs, known = service.rows("id FROM jobs"), service.rows("key FROM receipts")
    lies = []
    for key, text in ((call["key"], call["said"]) for call in calls):
        named = re.findall(r"done: (\d+)", text)
        true = all(int(job) in jobs for job in named)
        status = text.split(":")[0]
        if status == "done":
            true = true and owners.setdefault(named[0], key) == key
        elif status == "unknown":
            true = true and key in service.sent() and key not in service.answered
        else:
            true = true and status in ("rejected", "not sent") and key not in known
        if not true:
            lies.append(text)
    return lies


def jobs_told(told: "list[str]") -> int:
    """Count the different jobs that a model was told of."""
    return len(set(re.findall(r"done: (\d+)", " ".join(told))))


def calls_answered(told: "list[str]") -> int:
    """Count the calls of which a model was told that they are done."""
    return sum(text.startswith("done") for text in told)


# What a model wants: how many jobs, whether it asks for all at once, how it counts.
Model = namedtuple("Model", "wanted at_once count")
# One job is asked for in one call, at once or not.
SHAPES = ((1, False), (2, False), (2, True), (3, False), (3, True))
MODELS = tuple(
    Model(*s, count) for s in SHAPES for count in (jobs_told, calls_answered)
)


def next_calls(model: Model, told: "list[str]") -> "list[str]":
    """Return the calls of the model's next turn, none if it has what it wants."""
    missing = max(0, model.wanted - model.count(told))
    return ["weekly"] * (missing if model.at_once else min(missing, 1))


def converse(model: Model, take: Callable) -> "list[str]":
    """Let `take(turn, calls)` be the model's runner; return all that it was told."""
    told = []
    for number in range(PATIENCE):
        calls = next_calls(model, told)
        told += take(f"turn-{number}", calls) if calls else []
    return told


def key_per_call(service: Service, notes: object) -> Callable:
    """Return a runner that makes a key for every tool call."""
    return without_notes(service, lambda request: uuid.uuid4().hex)


def hash_of_request(service: Service, notes: object) -> Callable:
    """Return a runner whose key is a hash of the request."""
    digest = hashlib.sha256
    return without_notes(service, lambda request: digest(request.encode()).hexdigest())


def without_notes(service: Service, key_of: Callable) -> Callable:
    """Return a runner that has no notes, and says what it hears."""

    def outcome(request: str) -> str:
        try:
            return f"done: {service.send(key_of(request), request)}"
        except TimeoutError:
            return "unknown"

    return lambda turn, calls: [outcome(request) for request in calls]


def with_notes(
    service: Service, notes: sqlite3.Connection, owners: "dict | None" = None
) -> Callable:
    """Return the worked code's runner; an untrue text ends it."""
    owners = {} if owners is None else owners

    def take(turn: str, calls: "list[str]") -> "list[str]":
        used = service.runner
        texts = used.take_turn(notes, turn, calls, lambda _: 60, service.send)
        lies = untrue(service, used.read(notes, used.OF_TURN, turn), owners)
        if lies:
            raise AssertionError(f"untrue: {lies}")
        return texts

    return take


RUNNERS = {f.__name__: f for f in (key_per_call, hash_of_request, with_notes)}


def open_notes(path: object, runner: object = runner) -> sqlite3.Connection:
    """Return a connection to the notes at `path`, new ones if there are none."""
    notes = sqlite3.connect(path, timeout=0, isolation_level=None)
    # A process that dies loses nothing by this: only a machine that dies would.
    notes.execute("PRAGMA synchronous = OFF")
    notes.executescript(runner.NOTES)
    return notes


def too_many(service: Service, name: str, model: Model) -> int:
    """Run a script; return how many more jobs were made than were wanted."""
    service.start_over()
    with contextlib.closing(open_notes(":memory:", service.runner)) as notes:
        converse(model, RUNNERS[name](service, notes))
    return len(service.rows("id FROM jobs")) - model.wanted


def load(path: str) -> types.SimpleNamespace:
    """Return the runner at `path`, which may be a broken copy."""
    return types.SimpleNamespace(**runpy.run_path(path))


def killed(path: str, database: str, step: str, turn: str, *calls: str) -> None:
    """Take a turn by the runner at `path`, in this process, killed at a step of it.

    A step comes before each SQL statement on the notes, and around each send.
    """
    used, steps = load(path), itertools.count()

    def walk(_: object) -> None:
        if next(steps) == int(step):
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def send(key: str, request: str) -> int:
        walk("before the send")
        try:
            return service.send(key, request)
        finally:
            walk("after the send")

    service = Service(database, "after_commit", runner=used)
    with watched(walk):
        notes = open_notes(f"{database}-notes", used)
    used.take_turn(notes, turn, calls, lambda _: 60, send)


if __name__ == "__main__":
    logging.disable()  # each silence is logged, and there are thousands
    killed(*sys.argv[1:])
