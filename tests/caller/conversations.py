"""What does a model do when a call of its tool gets no answer? A script stands in for it.

A model wants a number of equal jobs. It sees only what it is told, and calls until it was
told of so many. One kind counts the jobs it was told of, another its answered calls. Each
script is such a model and four faults, which strike the first four attempts.

`python -m tests.experiments.conversations RUNNER FAULT` runs all scripts whose first fault
is FAULT, and prints for each how many jobs more were made than were wanted. That is a
process of its own, and imports little, because it forks for each attempt that dies.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import sqlite3
import sys
import tempfile
import uuid
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import retry_lab
from tests.experiments import runner
from tests.watch import ended, forked

FAULTS = ("none", "before_commit", "after_commit")
PATIENCE = 7  # turns: four silences and three answers, and then a model gives up


class Void(BaseException):
    """An attempt did not die where it should: what comes of it proves nothing."""


class Service:
    """A service with a new database, whose attempts die one after the other as told."""

    def __init__(self, database: str, *faults: str) -> None:
        for left in Path(database).parent.glob(f"{Path(database).name}*"):
            left.unlink()
        self.database, self.faults = database, faults
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.executescript(f"BEGIN; {retry_lab.SCHEMA} COMMIT;")
        # In a file, so that what a killed runner sent is counted too.
        self.log = Path(f"{database}.attempts")
        self.log.touch()

    def attempts(self) -> int:
        """Return how many attempts there were."""
        return self.log.stat().st_size

    def send(self, key: str, request: str) -> str:
        """Make an attempt; return its answer, or raise."""
        place = self.attempts()
        with open(self.log, "a") as log:
            log.write(".")
        fault = self.faults[place] if place < len(self.faults) else "none"
        call = (self.database, key, request, fault)
        if fault == "none":
            return f"job {retry_lab.create_job(*call)}"
        if ended(forked(retry_lab.create_job, *call)) not in (17, 18):
            raise Void(call)
        raise TimeoutError(key)

    def reports(self) -> "list[str]":
        """Return the reports of the jobs, in the order in which they were made."""
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            jobs = connection.execute("SELECT report FROM jobs ORDER BY id")
            return [report for (report,) in jobs]


def jobs_told(told: "list[str]") -> int:
    """Count the different jobs that a model was told of."""
    return len(set(re.findall(r"job \d+", " ".join(told))))


def calls_answered(told: "list[str]") -> int:
    """Count the calls of which a model was told that they are done."""
    return sum(text.startswith("done") for text in told)


# What a model wants: how many jobs, whether it asks for all at once, how it counts.
Model = namedtuple("Model", "wanted at_once count")
COUNTS = (jobs_told, calls_answered)
# One job is asked for in one call, at once or not.
SHAPES = ((1, False), (2, False), (2, True), (3, False), (3, True))
MODELS = tuple(Model(*shape, count) for shape in SHAPES for count in COUNTS)


def next_calls(model: Model, told: "list[str]") -> "list[str]":
    """Return the calls of the model's next turn, none if it has what it wants."""
    missing = max(0, model.wanted - model.count(told))
    return ["weekly"] * (missing if model.at_once else min(missing, 1))


def converse(model: Model, take: Callable) -> "list[tuple[list, list]]":
    """Let `take(turn, calls)` be the model's runner; return all calls and texts."""
    turns, told = [], []
    calls = next_calls(model, told)
    while calls and len(turns) < PATIENCE:
        texts = take(f"turn-{len(turns)}", calls)
        turns.append((calls, texts))
        told += texts
        calls = next_calls(model, told)
    return turns


def key_per_call(service: Service, _: sqlite3.Connection) -> Callable:
    """Return a runner that mints a key for every tool call."""
    return without_notes(service, lambda request: uuid.uuid4().hex)


def hash_of_request(service: Service, _: sqlite3.Connection) -> Callable:
    """Return a runner whose key is a hash of the request."""
    digest = hashlib.sha256
    return without_notes(service, lambda request: digest(request.encode()).hexdigest())


def without_notes(service: Service, key_of: Callable) -> Callable:
    """Return a runner that has no notes, and says what it hears."""

    def outcome(request: str) -> str:
        try:
            answer = service.send(key_of(request), request)
        except TimeoutError:
            return runner.UNKNOWN
        return runner.DONE.format(answer=answer)

    return lambda turn, calls: [outcome(request) for request in calls]


def with_notes(service: Service, notes: sqlite3.Connection) -> Callable:
    """Return the worked code's runner."""

    def take(turn: str, calls: "list[str]") -> "list[str]":
        return runner.take_turn(notes, "chat", turn, calls, service.send, 0, 60)

    return take


RUNNERS = {f.__name__: f for f in (key_per_call, hash_of_request, with_notes)}


def open_notes(path: object) -> sqlite3.Connection:
    """Return a connection to the notes at `path`, new ones if there are none."""
    notes = sqlite3.connect(path)
    # A process that dies loses nothing by this: only a machine that dies would.
    notes.execute("PRAGMA synchronous = OFF")
    notes.execute(runner.NOTES)
    return notes


# What was sent, up to the last attempt, all that was said, and the jobs that came of it.
Run = namedtuple("Run", "faults turns jobs")


def run_script(database: str, name: str, model: Model, faults: tuple) -> Run:
    """Let the model talk to a runner whose attempts die as `faults` say."""
    service = Service(database, *faults)
    with contextlib.closing(open_notes(":memory:")) as notes:
        turns = converse(model, RUNNERS[name](service, notes))
    return Run(faults[: service.attempts()], turns, len(service.reports()))


def already_run(runs: "list[Run]", model: Model, faults: tuple) -> "Run | None":
    """Return the run that goes as the script of `model` and `faults` would, if any."""
    for run in runs:
        same_faults = faults[: len(run.faults)] == run.faults
        if same_faults and says_the_same(model, run.turns):
            return run
    return None


def says_the_same(model: Model, turns: "list[tuple[list, list]]") -> bool:
    """Return whether the model would have made the same calls in all these turns."""
    told = []
    for calls, texts in turns:
        if next_calls(model, told) != calls:
            return False
        told += texts
    return len(turns) == PATIENCE or not next_calls(model, told)


def too_many(folder: str, name: str, first_fault: str) -> "list[int]":
    """Return for each script how many more jobs were made than were wanted."""
    database = os.path.join(folder, "service.sqlite")
    runs, results = [], []
    for later_faults in itertools.product(FAULTS, repeat=3):
        faults = (first_fault, *later_faults)
        for model in MODELS:
            run = already_run(runs, model, faults)
            if run is None:
                run = run_script(database, name, model, faults)
                runs.append(run)
            results.append(run.jobs - model.wanted)
    return results


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of each silence, and there are thousands
    with tempfile.TemporaryDirectory() as temporary:
        json.dump(too_many(temporary, *sys.argv[1:]), sys.stdout)
