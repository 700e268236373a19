"""What if the runner dies, and not only the worker that it called?

Crash model: SIGKILL strikes the runner, the caller's process. Its worker lives on as an
orphan in mid-transaction, or dies with it. What was committed to a file stays.

Found: a note of the key, committed before the first attempt, is enough. Wherever the
runner dies, its successor sends the key in the note again, and there is one job. With
no note the successor can only mint another key, and there are two.

Two records, two owners: the note is the caller's, the receipt is the service's. What a
model is told after such a death is another question, of test_model_calls_again.py.
"""

import json
import os
import signal
import sqlite3
import subprocess
import unittest
from contextlib import closing

from tests.support import LAB, ROOT, LabTest, environment, worker_command
from tests.watch import held_command

# A runner takes a turn with one call; a successor does just the same.
RUNNER = """
import json, sqlite3, subprocess, sys
from tests.experiments.runner import NOTES, take_turn

path, *worker = sys.argv[1:]
def send(key, request):
    command = [*worker, key, request, "none"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return "job " + answer.decode().strip()
notes = sqlite3.connect(path)
notes.execute(NOTES)
told = take_turn(notes, "chat", "turn-1", ["weekly"], send, now=0, retention=60)
print(json.dumps(told))
"""
# This one writes its note only when it has the answer.
LATE_WRITER = RUNNER.replace(
    "told = take_turn(",
    """import uuid
key = uuid.uuid4().hex
answer = send(key, "weekly")
note = "INSERT INTO notes VALUES ('chat', 'turn-1', 0, 'weekly', ?, 'answered', ?, 0"
notes.execute(note + ", NULL, NULL)", (key, answer))
notes.commit()
told = take_turn(""",
)


@unittest.skipUnless(os.name == "posix", "SIGKILL and orphans are POSIX's")
class RunnerDeath(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.database, self.notes = self.new_database(), self.folder / "notes.sqlite"
        self.lean = worker_command(self.database)
        self.held = held_command("COMMIT", LAB, "worker", self.database)

    def start(
        self, worker: "list[str]", at: str = "-", code: str = RUNNER
    ) -> subprocess.Popen:
        """Start a runner, held at `at`; its worker has the same stdin and stderr."""
        script = self.folder / "a_runner.py"
        script.write_text(code, encoding="utf-8")
        command = held_command(at, script, self.notes, *worker)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        settings = {"cwd": ROOT, "env": environment(), "start_new_session": True}
        started = subprocess.Popen(command, text=True, **pipes, **settings)
        self.addCleanup(started.__exit__, None, None, None)  # close its pipes, wait
        return started

    def killed(
        self, at: str, worker: list, code: str = RUNNER, kill: object = os.kill
    ) -> subprocess.Popen:
        """Start a runner; kill it when it, or its worker, has come to `at`."""
        dead = self.start(worker, at if worker is self.lean else "-", code)
        self.assertEqual(dead.stderr.readline(), at + "\n")
        kill(dead.pid, signal.SIGKILL)
        self.assertEqual(dead.wait(), -signal.SIGKILL)
        return dead

    def orphan_commits(self, dead: subprocess.Popen) -> None:
        """Let the worker of a dead runner go on, and wait until it is gone as well."""
        self.assertEqual(self.rows(self.database), ([], []))
        dead.stdin.close()
        # It commits, and then its answer reaches nobody. Its exit ends the pipe.
        self.assertEqual(dead.stderr.read(), "error: [Errno 32] Broken pipe\n")

    def finishes(self, successor: subprocess.Popen, answer: str) -> None:
        """Let a successor come to its end: the model is told that this job is done."""
        told, complaints = successor.stdout.read(), successor.stderr.read()
        self.assertEqual((complaints, successor.wait()), ("", 0))
        (text,) = json.loads(told)
        self.assertRegex(text, f"^done: {answer}[.]")

    def look(self) -> "tuple[str, tuple, tuple]":
        """Return the only note's key, its state and answer, and the service's rows."""
        with closing(sqlite3.connect(self.notes)) as notes:
            ((key, *note),) = notes.execute("SELECT key, state, answer FROM notes")
        return key, tuple(note), self.rows(self.database)

    def assert_one_job(self, key: str) -> None:
        rows = ([(1, "weekly")], [(key, "weekly", 1)])
        self.assertEqual(self.look(), (key, ("answered", "job 1"), rows))

    def assert_two_jobs(self) -> None:
        """Two jobs, and the note knows only the key and the job of the second."""
        key, note, (jobs, receipts) = self.look()
        self.assertEqual(note, ("answered", "job 2"))
        self.assertEqual(jobs, [(1, "weekly"), (2, "weekly")])
        lost_key = receipts[0][0]
        self.assertEqual(receipts, [(lost_key, "weekly", 1), (key, "weekly", 2)])

    def test_a_successor_that_reads_the_note_replays(self) -> None:
        """Killed in mid-call: the successor sends the note's key and gets that job."""
        dead = self.killed("COMMIT", self.held)
        key, note, _ = self.look()
        self.assertEqual(note, ("sent", None))
        begin = held_command("BEGIN IMMEDIATE", LAB, "worker", self.database)
        successor = self.start(begin)
        self.assertEqual(successor.stderr.readline(), "BEGIN IMMEDIATE\n")
        successor.stdin.close()  # its worker goes for the lock, which the orphan has
        self.orphan_commits(dead)
        self.finishes(successor, "job 1")
        self.assert_one_job(key)

    def test_a_successor_that_mints_a_fresh_key_makes_a_second_job(self) -> None:
        """Killed in mid-call: a successor that has no note makes a second job."""
        self.orphan_commits(self.killed("COMMIT", self.held))
        os.remove(self.notes)
        self.finishes(self.start(self.lean), "job 2")
        self.assert_two_jobs()

    def test_a_key_written_down_after_the_call_is_lost(self) -> None:
        """A key written down only with the answer is lost when the runner is killed."""
        self.orphan_commits(self.killed("COMMIT", self.held, code=LATE_WRITER))
        with closing(sqlite3.connect(self.notes)) as notes:
            self.assertEqual(notes.execute("SELECT * FROM notes").fetchall(), [])
        self.finishes(self.start(self.lean), "job 2")
        self.assert_two_jobs()

    def test_a_runner_killed_before_the_call_leaves_its_key(self) -> None:
        """Killed between planned and sent: the successor sends the key; one job."""
        self.killed("UPDATE notes SET state = 'sent'", self.lean)
        key, *seen = self.look()
        self.assertEqual(seen, [("planned", None), ([], [])])
        self.finishes(self.start(self.lean), "job 1")
        self.assert_one_job(key)

    def test_an_answer_that_was_not_written_down_is_replayed(self) -> None:
        """Killed between the answer and its note: the successor gets it once more."""
        self.killed("UPDATE notes SET answer", self.lean)
        key, *seen = self.look()
        rows = ([(1, "weekly")], [(key, "weekly", 1)])
        self.assertEqual(seen, [("sent", None), rows])
        self.finishes(self.start(self.lean), "job 1")
        self.assert_one_job(key)

    def test_a_worker_killed_with_its_runner_leaves_nothing_to_replay(self) -> None:
        """Both killed before COMMIT: no job is there, and the note's key makes it."""
        dead = self.killed("COMMIT", self.held, kill=os.killpg)
        self.assertEqual(dead.stderr.read(), "")  # it ends: the worker is gone as well
        key, *seen = self.look()
        self.assertEqual(seen, [("sent", None), ([], [])])
        self.finishes(self.start(self.lean), "job 1")
        self.assert_one_job(key)


if __name__ == "__main__":
    unittest.main()
