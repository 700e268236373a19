"""What about any sequence of calls at all, and not only the five cases?

Crash model: a worker that has to die really dies, by os._exit in a process of its own,
and the machine lives on. One call follows another: none overlap.

A call has one of two keys, two reports and three faults: 12 calls, and 12 * 12 * 12 =
1,728 histories of three calls. Every one of them is made and held against the rules,
which are written down once more below, with nothing taken from the lab.

Found: after every call of every history, exit status, answer and all rows are what the
rules say. No history makes a second job for a key. What a dead worker leaves behind,
its journal too, is still there when the next call comes, and harms none.
"""

import contextlib
import itertools
import os
import unittest
from pathlib import Path

import retry_lab
from tests.support import LabTest, posix
from tests.watch import ended, forked

FAULTS = ("none", "before_commit", "after_commit")
CALLS = tuple(itertools.product(("op-a", "op-b"), ("weekly", "daily"), FAULTS))


def rules(made: list, key: str, report: str, fault: str) -> tuple:
    """Return the exit status and the answer of a call, and what is made after it.

    `made` lists a (key, report) for each job, in the order in which jobs were made.
    """
    recorded = dict(made)
    if recorded.get(key, report) != report:  # even if the worker was told to die
        return 20, "key_payload_conflict\n", made
    after = made if key in recorded else [*made, (key, report)]
    if fault == "before_commit":
        return 17, "", made
    if fault == "after_commit":
        return 18, "", after
    return 0, f"{after.index((key, report)) + 1}\n", after


def rows_of(made: list) -> tuple:
    """Return the rows that jobs and receipts must have when `made` is made."""
    jobs = [(number, report) for number, (_, report) in enumerate(made, 1)]
    return jobs, [(key, report, number) for number, (key, report) in enumerate(made, 1)]


def attempt(must_die: bool, *arguments: str) -> "tuple[int, str]":
    """Make an attempt without starting Python for it; return exit status and answer."""
    reader, writer = os.pipe()
    with open(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        # Who must die needs a process to die in. Whoever else dies takes the walker
        # along, and the test sees that in the walker's exit status.
        if must_die:
            status = ended(forked(retry_lab.worker, list(arguments)))
        else:
            status = retry_lab.worker(list(arguments))
    with open(reader) as answer:
        return status, answer.read()


def put_back(folder: Path, left: dict) -> None:
    """Make the files of `folder` those that `left` maps to their bytes, no others."""
    for path in folder.iterdir():
        if path not in left:
            path.unlink()
    for path, content in left.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


class Histories(LabTest):
    def walk(self, folder: Path, made: list, calls: tuple, *history: tuple) -> int:
        """Try each of `calls` after `history`, and what may follow; count histories."""
        if len(history) == 3:
            return 1
        database = str(folder / "service.sqlite")
        left = {path: path.read_bytes() for path in folder.iterdir()}
        walked = 0
        for call in calls:
            put_back(folder, left)
            status, answer, after = rules(made, *call)
            seen = attempt(status in (17, 18), database, *call), self.rows(database)
            expected = (status, answer), rows_of(after)
            self.assertEqual(seen, expected, (*history, call))
            walked += self.walk(folder, after, CALLS, *history, call)
        return walked

    @posix
    def test_every_history_of_three_calls_follows_the_rules(self) -> None:
        """In all 1,728 histories of three calls, every answer and row is the rules'."""
        reader, writer = os.pipe()

        def walker(name: str, calls: tuple) -> int:
            (self.folder / name).mkdir()
            self.new_database(f"{name}/service.sqlite")
            walked = self.walk(self.folder / name, [], calls)
            os.write(writer, f"{walked}\n".encode())
            return 0

        # What begins with another call shares nothing: two walkers, side by side.
        halves = ("even", CALLS[::2]), ("odd", CALLS[1::2])
        walkers = [forked(walker, *half) for half in halves]
        os.close(writer)
        statuses = [ended(process) for process in walkers]
        with open(reader) as walked:
            self.assertEqual((statuses, sum(map(int, walked))), ([0, 0], 1728))

    def test_a_sample_of_histories_holds_for_workers_started_afresh(self) -> None:
        """Five of the histories, made by workers started as the lab starts them."""
        histories = list(itertools.product(CALLS, repeat=3))[::359]
        ends = set()
        for number, history in enumerate(histories):
            database, made = self.new_database(f"{number}.sqlite"), []
            for call in history:
                key, report, _ = call
                replay = (key, report) in made
                status, answer, made = rules(made, *call)
                seen = self.call(database, *call), self.rows(database)
                self.assertEqual(seen, ((status, answer, ""), rows_of(made)), history)
                ends.add((status, replay))
        # Each way to end is among them, a death in mid-replay too.
        created, replayed = {(0, False), (17, False), (18, False)}, {(0, True)}
        deaths_of_replays = {(17, True), (18, True)}
        self.assertEqual(ends, {*created, *replayed, *deaths_of_replays, (20, False)})
        self.assertEqual(len(histories), 5)


if __name__ == "__main__":
    unittest.main()
