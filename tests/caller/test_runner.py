"""What if the model, told that there was no answer, calls the tool again?

Crash model: an attempt dies before or after COMMIT, really, and its runner hears nothing.
In some tests the runner is killed too, by SIGKILL, before any of its SQL statements or
around a send. No model is needed: a script stands in for it, wants a number of equal
jobs, sees only what it is told, and calls until it was told of so many. One kind counts
the jobs it was told of, another its calls that were answered.

Found: whether such a call is a retry or a second wish can't be seen from the call. A key
per tool call makes jobs too many, a hash of the request too few. With a note for each
operation, settled before anything new is sent, the number is exact in every script.
"""

import itertools
import json
import logging
import os
import runpy
import signal
import sqlite3
import types
import unittest
import uuid
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import retry_lab
from tests.experiments import runner
from tests.experiments.conversations import (
    FAULTS,
    MODELS,
    PATIENCE,
    RUNNERS,
    Model,
    Service,
    calls_answered,
    converse,
    jobs_told,
    open_notes,
)
from tests.support import ROOT, LabTest, edited, edits_of, posix, run, side_by_side
from tests.watch import ended, forked, watched

FULL_GRID = bool(os.environ.get("RETRY_LAB_FULL_GRID"))


def setUpModule() -> None:
    """Keep the runner from logging each silence, of which there are thousands."""
    logging.disable(logging.WARNING)
    unittest.addModuleCleanup(logging.disable, logging.NOTSET)


class Talk(LabTest):
    """What an experiment needs: a service, notes, and a runner that may be broken."""

    runner = runner  # the broken ones below take its place

    def setUp(self) -> None:
        super().setUp()
        self.database = str(self.folder / "service.sqlite")
        self.start_over()
        self.notes_path = self.folder / "notes.sqlite"
        self.notes = self.open_notes()

    def open_notes(self) -> sqlite3.Connection:
        """Return a connection to the notes, which is closed after the test."""
        notes = open_notes(self.notes_path)
        self.addCleanup(notes.close)
        return notes

    def start_over(self, *faults: str) -> None:
        """Begin with an empty database, and a service whose attempts die like that."""
        self.service = Service(self.database, *faults)

    def send(self, key: str, request: str) -> str:
        """Make an attempt at the service; a conflict comes from the key's look-up."""
        try:
            return self.service.send(key, request)
        except retry_lab.KeyPayloadConflict as conflict:
            raise self.runner.Rejected(str(conflict), looked_up=True) from conflict

    def take(self, turn: str, *calls: str, **other: object) -> "list[str]":
        """Take a turn of the conversation "chat", at time 0 if nothing else is said."""
        now = {"notes": self.notes, "conversation": "chat", "send": self.send, "now": 0}
        call = {**now, "turn": turn, "calls": list(calls), "retention": 60, **other}
        return self.runner.take_turn(**call)

    def status_words(self, turn: str, *calls: str, **other: object) -> "list[str]":
        """Take a turn; return the status words that the model is told."""
        return [str(text).split(":")[0] for text in self.take(turn, *calls, **other)]

    def reports(self) -> "list[str]":
        """Return the reports of the jobs, in the order in which they were made."""
        return self.service.reports()


@posix
class Grid(Talk):
    def test_only_the_notes_make_as_many_jobs_as_are_wanted(self) -> None:
        """In 810 scripts: a key per call misses in 568, a hash in 648, notes in none."""
        module = ["-B", "-m", "tests.experiments.conversations"]
        parts = list(itertools.product(RUNNERS, FAULTS))
        commands = [[*module, *part] for part in parts]
        figures = {name: [0, 0, 0] for name in RUNNERS}
        ends = side_by_side(lambda command: run(*command, cwd=ROOT), commands)
        for (name, _), done in zip(parts, ends):
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            results = json.loads(done.stdout)
            figures[name][0] += len(results)
            figures[name][1] += sum(result > 0 for result in results)
            figures[name][2] += sum(result < 0 for result in results)
        # Scripts, and those with jobs too many and too few.
        expected = {
            "key_per_call": [810, 568, 0],
            "hash_of_request": [810, 0, 648],
            "with_notes": [810, 0, 0],
        }
        self.assertEqual(figures, expected)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        self.assertIn(" | 568 of 810: too many jobs |\n", readme)
        self.assertIn(" | 648 of 810: too few |\n", readme)

    def test_a_sample_holds_for_workers_started_afresh(self) -> None:
        """Some of the scripts, with workers started as the lab starts them."""
        deaths = set()

        def send(key: str, request: str) -> str:
            fault = next(faults)
            status, answer, _ = self.call(self.database, key, request, fault)
            deaths.add(status)
            if status:
                raise TimeoutError(key)
            return f"job {answer.strip()}"

        scripts = list(itertools.product(MODELS, itertools.product(FAULTS, repeat=4)))
        for number, (model, sequence) in enumerate(scripts[::121]):
            self.start_over()
            faults = itertools.chain(sequence, itertools.repeat("none"))
            chat = {"conversation": f"chat-{number}", "send": send}
            converse(
                model, lambda turn, calls, chat=chat: self.take(turn, *calls, **chat)
            )
            self.assertEqual(self.reports(), ["weekly"] * model.wanted, sequence)
        self.assertEqual((number + 1, deaths), (7, {0, 17, 18}))


@posix
class RunnerKilled(Talk):
    def work(self, turn: str, calls: "list[str]", last: int, writer: int) -> int:
        """Take a turn and write the texts, as a process that is killed at a step.

        A step comes before each SQL statement, before and after each send, and before
        the return.
        """
        process, steps = os.getpid(), itertools.count()

        def step(_: object) -> None:
            # The forks that die in an attempt take no steps of the runner.
            if os.getpid() == process and next(steps) == last:
                os.kill(process, signal.SIGKILL)

        def send(key: str, request: str) -> str:
            step("before the send")
            try:
                return self.send(key, request)
            finally:
                step("after the send")

        with watched(step), closing(open_notes(self.notes_path)) as notes:
            texts = self.take(turn, *calls, notes=notes, send=send)
        step("before the return")
        os.write(writer, json.dumps(texts).encode())
        return 0

    def take_in_a_fork(self, turn: str, calls: "list[str]", last: int) -> "list | None":
        """Take a turn in a process that is killed at step `last`.

        Returns the texts, or None if it was killed before it could return them.
        """
        reader, writer = os.pipe()
        process = forked(self.work, turn, calls, last, writer)
        os.close(writer)
        with open(reader) as pipe:
            returned = pipe.read()
        self.assertEqual(ended(process), 0 if returned else -signal.SIGKILL)
        return json.loads(returned) if returned else None

    def take_with_deaths(
        self, turn: str, calls: "list[str]", steps: "list[int]"
    ) -> "list[str]":
        """Take a turn in processes killed at these steps, then in one that lives."""
        while steps:
            texts = self.take_in_a_fork(turn, calls, steps[0])
            if texts is not None:
                return texts
            steps.pop(0)
        return self.take(turn, *calls)

    def run_killed(self, model: Model, faults: tuple, doomed: str, *steps: int) -> bool:
        """Let the model talk to a runner that is killed at these steps of a turn.

        Returns whether the turn `doomed` came, and was killed at each of them.
        """
        self.start_over(*faults)
        self.notes.execute("DELETE FROM notes")
        self.notes.commit()
        left = list(steps)

        def take(turn: str, calls: "list[str]") -> "list[str]":
            texts = self.take_with_deaths(turn, calls, left if turn == doomed else [])
            # Nobody knows whether the texts were saved, so the turn comes once more.
            attempts = self.service.attempts()
            self.assertEqual(self.take(turn, *calls), texts)
            self.assertEqual(self.service.attempts(), attempts)
            return texts

        turns = converse(model, take)
        told = [text for _, texts in turns for text in texts]
        where = (model, faults, doomed, steps)
        self.assertEqual(self.reports(), ["weekly"] * model.wanted, where)
        self.assertEqual(jobs_told(told), model.wanted, where)
        return not left

    def killed_everywhere(self, model: Model, faults: tuple, twice: tuple = ()) -> int:
        """Kill the runner at each of its steps in a conversation; count the runs.

        `twice` are steps at which its successor is killed in a further run.
        """
        runs = 0
        for number in range(PATIENCE):
            turn = f"turn-{number}"
            for last in itertools.count():
                if not self.run_killed(model, faults, turn, last):
                    break
                for second in twice:
                    self.run_killed(model, faults, turn, last, second)
                runs += 1 + len(twice)
        return runs

    def test_a_successor_goes_on_wherever_the_runner_is_killed(self) -> None:
        """Two wanted jobs, a lost answer, a kill at any step: there are two jobs."""
        for model in (Model(2, False, jobs_told), Model(2, True, calls_answered)):
            runs = self.killed_everywhere(model, ("after_commit",))
            self.assertGreater(runs, 80)

    @unittest.skipUnless(FULL_GRID, "it takes minutes")
    def test_the_full_grid_of_killed_runners(self) -> None:
        """All models of two jobs, any two faults, and successors killed as well."""

        two = [model for model in MODELS if model.wanted == 2]
        runs = 0
        for model, first, second in itertools.product(two, FAULTS, FAULTS):
            runs += self.killed_everywhere(model, (first, second), (5, 15, 25))
        print("runs with a killed runner:", runs)
        self.assertGreater(runs, 10_000)


@posix
class Scripts(Talk):
    def test_a_call_with_another_request_waits_for_the_unknown_one(self) -> None:
        """A reworded call is not sent, and is told what the earlier one came to."""
        self.start_over("after_commit")
        self.assertEqual(self.status_words("turn-1", "weekly"), ["unknown"])
        (text,) = self.take("turn-2", "the weekly report")
        self.assertRegex(text, "^not sent: .* call 'weekly' .* it is done: job 1[.]")
        self.assertEqual(self.reports(), ["weekly"])
        self.assertEqual(self.status_words("turn-3", "the weekly report"), ["done"])
        self.assertEqual(self.reports(), ["weekly", "the weekly report"])

    def test_the_calls_behind_a_silent_one_are_withheld_for_good(self) -> None:
        """Three calls, the second silent: the third is not sent, nor by a successor."""
        self.start_over("none", "before_commit")
        calls = ("daily", "weekly", "monthly")
        words = ["done", "unknown", "not sent"]
        self.assertEqual(self.status_words("turn-1", *calls), words)
        self.assertEqual(self.status_words("turn-1", *calls), words)
        self.assertEqual(self.reports(), ["daily"])
        # Nor is anything of a turn that begins while one is unknown, but for that one.
        words = ["done", "not sent"]
        self.assertEqual(self.status_words("turn-2", "weekly", "monthly"), words)
        self.assertEqual(self.reports(), ["daily", "weekly"])
        self.assertEqual(self.status_words("turn-3", "monthly"), ["done"])
        self.assertEqual(self.reports(), ["daily", "weekly", "monthly"])

    def test_one_operation_answers_one_call(self) -> None:
        """Of two equal calls, only the first is told what the unknown one came to.

        This is what the rule costs: the second was a new wish, and has to come again.
        """
        self.start_over("after_commit")
        weekly = ("weekly", "weekly")
        self.assertEqual(self.status_words("turn-1", *weekly), ["unknown", "not sent"])
        first, second = self.take("turn-2", *weekly)
        self.assertEqual(first, self.runner.DONE_EARLIER.format(answer="job 1"))
        self.assertEqual(second.split(":")[0], "not sent")
        self.assertEqual(self.reports(), ["weekly"])
        self.assertEqual(self.status_words("turn-3", "weekly"), ["done"])
        self.assertEqual(self.reports(), ["weekly", "weekly"])

    def test_two_conversations_do_not_wait_for_each_other(self) -> None:
        """Equal reports of two conversations are two jobs, though one is unknown."""
        self.start_over("after_commit")
        self.assertEqual(self.status_words("turn-1", "weekly"), ["unknown"])
        other = {"conversation": "another chat"}
        self.assertEqual(self.status_words("turn-1", "weekly", **other), ["done"])
        self.assertEqual(self.reports(), ["weekly", "weekly"])
        self.assertEqual(self.status_words("turn-2", "weekly"), ["done"])
        self.assertEqual(self.reports(), ["weekly", "weekly"])

    def test_a_rejection_by_the_look_up_is_an_answer(self) -> None:
        """A key on record for another request: told, and it blocks nothing behind it."""

        def send(key: str, request: str) -> str:
            if request == "daily":
                retry_lab.create_job(self.database, key, "somebody's")
            return self.send(key, request)

        calls = ("weekly", "daily", "weekly")
        words = ["done", "rejected", "done"]
        self.assertEqual(self.status_words("turn-1", *calls, send=send), words)
        self.assertEqual(self.status_words("turn-1", *calls, send=send), words)
        self.assertEqual(self.status_words("turn-2", "daily"), ["done"])
        jobs = ["weekly", "somebody's", "weekly", "daily"]
        self.assertEqual(self.reports(), jobs)

    def test_another_rejection_is_an_answer_only_at_the_first_attempt(self) -> None:
        """A 429 after a silence says nothing about the attempt before it."""

        def busy(key: str, request: str) -> str:
            raise self.runner.Rejected("429, too many requests")

        def interrupted(key: str, request: str) -> str:
            self.send(key, request)
            raise KeyboardInterrupt

        self.start_over("after_commit")
        self.assertEqual(self.status_words("turn-1", "daily", send=busy), ["rejected"])
        self.assertEqual(self.status_words("turn-2", "weekly"), ["unknown"])
        self.assertEqual(self.status_words("turn-3", "weekly", send=busy), ["unknown"])
        self.assertEqual(self.status_words("turn-4", "weekly"), ["done"])
        # The attempt of a runner that ended in mid-call is a silence to its successor.
        with self.assertRaises(KeyboardInterrupt):
            self.take("turn-5", "daily", send=interrupted)
        self.assertEqual(self.status_words("turn-5", "daily", send=busy), ["unknown"])
        self.assertEqual(self.status_words("turn-6", "daily"), ["done"])
        self.assertEqual(self.reports(), ["weekly", "daily"])

    def test_a_person_decides_what_stays_unknown(self) -> None:
        """What a person found is told before anything new is sent, and once."""
        for number, (found, answer, word) in enumerate(
            (
                ("done", "job 7", "done"),
                ("not done", None, "not sent"),
                ("unknown", None, "unknown"),
            )
        ):
            self.start_over("before_commit")
            chat = {"conversation": f"chat-{number}"}
            self.assertEqual(self.status_words("turn-1", "weekly", **chat), ["unknown"])
            unknown = "SELECT key FROM notes WHERE state = 'sent'"
            ((key,),) = self.notes.execute(unknown).fetchall()
            for nonsense in (("done", None), ("not done", "job 7"), ("maybe", None)):
                with self.assertRaisesRegex(ValueError, "can't write down"):
                    self.runner.decide(self.notes, key, *nonsense)
            self.runner.decide(self.notes, key, found, answer)
            with self.assertRaisesRegex(ValueError, "no unknown operation"):
                self.runner.decide(self.notes, key, found, answer)
            words = ["not sent", word]
            for _ in range(2):
                said = self.status_words("turn-2", "daily", "weekly", **chat)
                self.assertEqual((said, self.reports()), (words, []), found)
            self.assertEqual(self.status_words("turn-3", "weekly", **chat), ["done"])
            self.assertEqual(self.reports(), ["weekly"])

    def test_nothing_is_sent_past_the_retention(self) -> None:
        """Past its retention a key may be as good as new: it is not sent again."""
        self.start_over("after_commit")
        self.assertEqual(self.status_words("turn-1", "weekly"), ["unknown"])
        with closing(sqlite3.connect(self.database)) as service, service:
            service.execute("DELETE FROM receipts")
        self.assertEqual(self.status_words("turn-2", "weekly", now=61), ["unknown"])
        self.assertEqual(self.status_words("turn-3", "daily", now=62), ["not sent"])
        self.assertEqual(self.reports(), ["weekly"])

    def test_a_turn_that_comes_again_with_other_calls_is_an_error(self) -> None:
        """The same name with other calls is an error, and nothing is sent."""
        self.take("turn-1", "weekly")
        for calls in (["daily"], ["weekly", "weekly"], []):
            with self.assertRaisesRegex(ValueError, "other calls"):
                self.take("turn-1", *calls)
        self.assertEqual(self.reports(), ["weekly"])

    def test_a_request_that_cannot_be_sent_is_not_noted(self) -> None:
        """What can't be sent is an error before any call of its turn is noted."""
        for request in ("\udcff", {"report": "weekly"}):
            with self.assertRaises((UnicodeEncodeError, AttributeError)):
                self.take("turn-1", "weekly", request)
        self.assertEqual(self.status_words("turn-2", "weekly"), ["done"])
        self.assertEqual(self.reports(), ["weekly"])

    def test_an_answer_that_cannot_be_noted_is_silence(self) -> None:
        """What `send` returns by a bug blocks nothing: the noted key is sent again."""
        for number, answer in enumerate((None, {"job": 1}, "\ud800")):
            chat = {"conversation": f"chat-{number}"}
            said = self.status_words(
                "turn-1", "weekly", send=lambda *_, answer=answer: answer, **chat
            )
            self.assertEqual(said, ["unknown"])
            self.assertEqual(self.status_words("turn-2", "weekly", **chat), ["done"])

    def test_a_turn_without_calls_tells_nothing(self) -> None:
        """A turn without calls sends nothing and takes no answer from a later one."""
        self.start_over("after_commit")
        self.assertEqual(self.status_words("turn-1", "weekly"), ["unknown"])
        self.assertEqual(self.take("turn-2"), [])
        self.assertEqual(self.status_words("turn-3", "weekly"), ["done"])
        self.assertEqual(self.reports(), ["weekly"])


@posix
class TwoProcesses(Talk):
    """One process takes a turn while a send of another's is under way."""

    def meanwhile(self, turn: str, calls: tuple, do: Callable) -> "list[str]":
        """Take the turn; after its first send `do`, with a connection of its own."""
        todo = [do]

        def send(key: str, request: str) -> str:
            try:
                return self.send(key, request)
            finally:
                if todo:
                    todo.pop()(self.open_notes())

        return self.status_words(turn, *calls, send=send)

    def test_the_same_turn_in_two_processes_makes_no_second_job(self) -> None:
        """Keys are minted once, the first to tell is believed, the jobs are exact."""

        def same_turn(notes: sqlite3.Connection) -> None:
            other.append(self.status_words("turn-0", *calls, notes=notes))

        calls = ("weekly", "weekly")
        for faults in itertools.product(FAULTS, repeat=3):
            self.start_over(*faults)
            self.notes.execute("DELETE FROM notes")
            self.notes.commit()
            other = []
            one = self.meanwhile("turn-0", calls, same_turn)
            self.assertEqual([one], other, faults)
            # Two wanted jobs, all at once: the model goes on until it has them.
            for number in range(1, PATIENCE):
                missing = 2 - one.count("done")
                one += self.status_words(f"turn-{number}", *calls[:missing])
            self.assertEqual(self.reports(), ["weekly", "weekly"], faults)

    def test_a_second_turn_at_once_is_turned_away(self) -> None:
        """Another turn is an error while one is under way, before anything is sent."""

        def other_turn(notes: sqlite3.Connection) -> None:
            with self.assertRaisesRegex(RuntimeError, "take the turn before it"):
                self.take("turn-2", "weekly", notes=notes)

        self.assertEqual(self.meanwhile("turn-1", ("weekly",), other_turn), ["done"])
        self.assertEqual(self.status_words("turn-2", "weekly"), ["done"])
        self.assertEqual(self.reports(), ["weekly", "weekly"])


@posix
class Limits(Talk):
    def test_nothing_new_goes_out_while_the_service_is_down(self) -> None:
        """While the service is down only the noted key goes out, whatever is called."""
        sent = []

        def down(key: str, request: str) -> str:
            sent.append((key, request))
            raise ConnectionError("the service is down")

        for number, report in enumerate(("weekly", "daily", "monthly")):
            self.take(f"turn-{number}", report, send=down)
        self.assertEqual(len(sent), 3)
        self.assertEqual({request for _, request in sent}, {"weekly"})
        self.assertEqual(len(set(sent)), 1)

    def test_a_service_that_ignores_keys_makes_a_duplicate(self) -> None:
        """The rule is for a service that replays: without it there are two jobs."""
        self.start_over("after_commit")

        def keyless(key: str, request: str) -> str:
            return self.send(uuid.uuid4().hex, request)

        for turn, word in (("turn-1", "unknown"), ("turn-2", "done")):
            self.assertEqual(self.status_words(turn, "weekly", send=keyless), [word])
        self.assertEqual(self.reports(), ["weekly", "weekly"])

    def test_a_model_that_rewords_and_counts_its_answers_gets_too_many(self) -> None:
        """It wants one job; told "weekly is done: job 1", only one of two is content."""
        for number, (count, wanted) in enumerate(((jobs_told, 1), (calls_answered, 2))):
            self.start_over("after_commit")
            chat = {"conversation": f"chat-{number}"}
            told = self.take("turn-1", "weekly", **chat)
            for turn in ("turn-2", "turn-3"):
                if count(told) < 1:
                    told += self.take(turn, "this week's report", **chat)
            self.assertEqual(len(self.reports()), wanted)


# A rule of the runner, a diff that breaks it, and the experiment that fails then.
Broken = namedtuple("Broken", "rule diff seen_by")
KILLED = RunnerKilled("test_a_successor_goes_on_wherever_the_runner_is_killed")
REWORDED = Scripts("test_a_call_with_another_request_waits_for_the_unknown_one")
WITHHELD = Scripts("test_the_calls_behind_a_silent_one_are_withheld_for_good")
EQUAL = Scripts("test_one_operation_answers_one_call")
REJECTED = Scripts("test_a_rejection_by_the_look_up_is_an_answer")
BUSY = Scripts("test_another_rejection_is_an_answer_only_at_the_first_attempt")
DECIDED = Scripts("test_a_person_decides_what_stays_unknown")
OTHER_CALLS = Scripts("test_a_turn_that_comes_again_with_other_calls_is_an_error")
EXPIRED = Scripts("test_nothing_is_sent_past_the_retention")
SAME_TURN = TwoProcesses("test_the_same_turn_in_two_processes_makes_no_second_job")
OTHER_TURN = TwoProcesses("test_a_second_turn_at_once_is_turned_away")
BROKEN = (
    Broken(
        "the notes are committed before the send, and not at the end of the turn",
        """
-    plan(notes, conversation, turn, calls)
+    committed, notes = notes, sqlite3.connect(":memory:")
+    committed.backup(notes)
+    plan(notes, conversation, turn, calls)
@@
         tell(notes, conversation, turn)
+    notes.backup(committed)
+    notes.close()
+    notes = committed
""",
        KILLED,
    ),
    Broken(
        "a restart mints no new key",
        """
                 raise ValueError(f"{turn} had other calls: {noted}")
+            mint = "UPDATE notes SET key = hex(randomblob(16)) WHERE state = 'sent'"
+            notes.execute(mint)
""",
        KILLED,
    ),
    Broken(
        "withheld calls are noted",
        """
-        notes.execute(withhold, at)
-        calls = of_turn(notes, *at)
+        calls = of_turn(notes, *at)
+        calls = [call for call in calls if call.state != "planned"]
@@
-    return [note.said for note in of_turn(notes, conversation, turn)]
+    calls = of_turn(notes, conversation, turn)
+    return [note.said or "not sent" for note in calls]
""",
        WITHHELD,
    ),
    Broken(
        "a turn that begins with an unknown operation sends nothing new",
        """
-        else:
-            for note in of_turn(notes, conversation, turn):
+        if True:
+            for note in of_turn(notes, conversation, turn):
""",
        REWORDED,
    ),
    Broken(
        "nothing new is sent before the earlier operation is settled",
        """
-        if earlier:
+        if False:
""",
        REWORDED,
    ),
    Broken(
        "no call behind a silent one is sent",
        """
-                    break  # the calls behind a silence are withheld
+                    pass
""",
        WITHHELD,
    ),
    Broken(
        "a rejection by the look-up is no silence",
        """
-        state, answer = "rejected", str(rejection)
+        return False
""",
        REJECTED,
    ),
    Broken(
        "another rejection after a silence is no answer",
        """
-        if note.state == "sent" and not rejection.looked_up:
+        if False:
""",
        BUSY,
    ),
    Broken(
        '"sent" is written before the send, not after it',
        """
-            notes.execute(sent, (now, key))
+            pass
@@
-        LOG.warning("no answer to %s", key, exc_info=True)
+        with notes:
+            sent = "UPDATE notes SET state = 'sent', first_sent = 0 WHERE key = ?"
+            notes.execute(sent, (key,))
@@
-            WHERE key = ? AND state = 'sent'\"""
-        notes.execute(heard, (answer, state, key))
+            WHERE key = ?\"""
+        notes.execute(heard, (answer, state, key))
""",
        BUSY,
    ),
    Broken(
        '"answered" is written after the answer, not before it',
        """
-            sent = \"""UPDATE notes SET state = 'sent', first_sent = ?
+            sent = \"""UPDATE notes SET state = 'answered', answer = '', first_sent = ?
""",
        KILLED,
    ),
    Broken(
        "one operation answers one call",
        """
-            earlier = None  # one operation answers one call
+            pass
""",
        EQUAL,
    ),
    Broken(
        "what a person found is told before anything new is sent",
        """
-        if earlier:
+        if earlier and earlier.state == "sent":
""",
        DECIDED,
    ),
    Broken(
        "nothing is sent past the retention",
        """
-        elif now - note.first_sent > retention:
+        elif False:
""",
        EXPIRED,
    ),
    Broken(
        "a turn keeps its calls",
        """
-            if [note.request for note in noted] != list(calls):
+            if False:
""",
        OTHER_CALLS,
    ),
    Broken(
        "one turn at a time",
        """
-        if notes.execute(READ + unfinished, (conversation,)).fetchone():
+        if False:
""",
        OTHER_TURN,
    ),
    Broken(
        "what was told first stands",
        """
-        if all(note.said for note in of_turn(notes, *at)):
+        if False:
""",
        SAME_TURN,
    ),
)


@posix
class BrokenRules(LabTest):
    def broken(self, edits: "list[tuple[str, str]]") -> types.ModuleType:
        """Return the runner as a module of its own, with the edits made."""
        source = Path(runner.__file__).read_text(encoding="utf-8")
        path = self.folder / "broken_runner.py"
        path.write_text(edited(source, *edits), encoding="utf-8")
        module = types.ModuleType("broken_runner")
        module.__dict__.update(runpy.run_path(str(path)))
        return module

    def test_every_broken_rule_is_seen_by_an_experiment(self) -> None:
        """With any one rule of the runner broken, an experiment fails, by its checks."""
        for rule, diff, experiment in BROKEN:
            with self.subTest(rule):
                again = type(experiment)(experiment._testMethodName)
                again.runner = self.broken(edits_of(diff))
                seen = unittest.TestResult()
                again.run(seen)
                self.assertEqual((len(seen.failures), seen.errors), (1, []))


if __name__ == "__main__":
    unittest.main()
