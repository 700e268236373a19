"""What if the model, told that there was no answer, calls the tool again?

Crash model: an attempt dies before or after COMMIT, and its runner hears nothing. The
runner is killed too, by SIGKILL, before any of its SQL statements or around a send.

Found: whether such a call is a retry or a second wish can't be seen from it. A key
per tool call makes jobs too many, a hash of the request too few. With a note for each
operation, settled before anything new is sent, the number is exact in every script, and
each text is true when it is told. A successor goes on wherever its runner was killed.
"""

import itertools
import logging
import sqlite3
import unittest
from contextlib import closing
from pathlib import Path
from unittest import mock

from tests.caller import runner
from tests.caller.conversations import (
    FAULTS,
    MODELS,
    REJECTIONS,
    RUNNERS,
    Model,
    Service,
    calls_answered,
    converse,
    jobs_told,
    load,
    open_notes,
    too_many,
    with_notes,
)
from tests.support import ROOT, LabTest, edited, run, side_by_side

RUNNER = Path(runner.__file__)
SCRIPT = ("-B", "-m", "tests.caller.conversations")


def setUpModule() -> None:
    """Keep the runner from logging each silence, of which there are thousands."""
    logging.disable()
    unittest.addModuleCleanup(logging.disable, logging.NOTSET)


class Grid(LabTest):
    runner = runner

    def test_only_the_notes_make_as_many_jobs_as_are_wanted(self) -> None:
        """Of 810 scripts a key per call misses 568, a hash 648, the notes none."""
        figures, known = {name: [0, 0, 0] for name in RUNNERS}, {}
        faults = itertools.product(FAULTS, repeat=4)
        for name, sequence, model in itertools.product(RUNNERS, faults, MODELS):
            # A script that meets the same faults, as far as it goes, is the same.
            met = [(name, model, sequence[:length]) for length in range(1, 5)]
            more = next((known[script] for script in met if script in known), None)
            if more is None:
                service = Service(f"{self.folder}/db", *sequence)
                more = too_many(service, name, model)
                known[name, model, sequence[: len(service.sent())]] = more
            figures[name][0] += 1
            figures[name][1] += more > 0
            figures[name][2] += more < 0
        # Scripts, and those with jobs too many and too few.
        expected = {
            "key_per_call": [810, 568, 0],
            "hash_of_request": [810, 0, 648],
            "with_notes": [810, 0, 0],
        }
        self.assertEqual(figures, expected)

    def test_a_sample_holds_for_attempts_that_really_die(self) -> None:
        """Some of the scripts, with workers started as the lab starts them."""
        deaths = []

        def die(*call: str) -> None:
            deaths.append(self.call(*call)[0])

        faults = itertools.product(FAULTS, repeat=4)
        for sequence, model in list(itertools.product(faults, MODELS))[::121]:
            service = Service(f"{self.folder}/db", *sequence)
            service.die = die
            self.assertEqual(too_many(service, "with_notes", model), 0)
        self.assertEqual(set(deaths), {17, 18})

    def test_every_text_is_true_when_it_is_told(self) -> None:
        """Rejections and conflicts as well; with_notes raises at an untrue text."""
        for faults in itertools.product((*FAULTS, *REJECTIONS), repeat=2):
            for model in MODELS:
                service = Service(f"{self.folder}/db", *faults, runner=self.runner)
                more = too_many(service, "with_notes", model)
                self.assertEqual(more, 0, (faults, model))


class RunnerKilled(LabTest):
    runner, path = runner, RUNNER

    def run_killed(self, model: Model, doomed: str, step: int) -> bool:
        """Kill the runner at a step of turn `doomed`; return whether it came there."""
        database = f"{self.folder}/{model.at_once}-{doomed}-{step}.sqlite"
        service = Service(database, "after_commit", runner=self.runner)
        service.start_over()
        died, owners = [], {}

        def take(turn: str, calls: "list[str]") -> "list[str]":
            if turn == doomed:
                arguments = (self.path, database, step, turn, *calls)
                done = run(*SCRIPT, *arguments, cwd=ROOT)
                self.assertEqual(done.stderr, "")
                died.append(done.returncode)
            with closing(open_notes(f"{database}-notes", self.runner)) as notes:
                taken = with_notes(service, notes, owners)
                texts, attempts = taken(turn, calls), service.sent()
                # Nobody knows whether the texts were saved, so the turn comes again.
                self.assertEqual(taken(turn, calls), texts)
                self.assertEqual(service.sent(), attempts)
                return texts

        told = converse(model, take)
        jobs = service.rows("report FROM jobs")
        self.assertEqual(jobs, ["weekly"] * model.wanted, (model, doomed, step))
        self.assertEqual(jobs_told(told), model.wanted, (model, doomed, step))
        return any(died)

    def test_a_successor_goes_on_wherever_the_runner_is_killed(self) -> None:
        """Two wanted jobs, a lost answer, a kill at any step: there are two jobs."""

        def kill_everywhere(model: Model, doomed: str) -> int:
            for step in itertools.count():
                if not self.run_killed(model, doomed, step):
                    return step

        one_each, both = Model(2, False, jobs_told), Model(2, True, calls_answered)
        models = (both, both, one_each, one_each, one_each)
        turns = ("turn-0", "turn-1", "turn-0", "turn-1", "turn-2")
        if self.path != RUNNER:  # a broken one is seen in its first turn
            models = models[:1]
        steps = side_by_side(kill_everywhere, models, turns)
        self.assertGreater(min(steps), 15)


# Conversations, each with its rule: calls | what each send hears | what is told.
BAD = "rejected: ValueError('no such tool')"
TALKS = """no call behind a silence is sent, nor by a later turn
daily weekly monthly | 1 silent | done: 1; UNKNOWN; OPEN UNKNOWN, and has to come first
monthly | 2 | OPEN done: 2
monthly | 3 | done: 3

one operation answers one call
weekly | silent | UNKNOWN
weekly daily | silent | OPEN UNKNOWN, and both are one; OPEN UNKNOWN, LATER
weekly weekly | 1 | done: 1, which answers your earlier call as well; OPEN done: 1
weekly | 2 | done: 2

a rejection is an answer to the first attempt only
weekly daily | 429 1 | rejected: 429; done: 1
weekly | silent | UNKNOWN
daily | 429 | OPEN unknown: the last attempt was rejected: 429, and has to come first
weekly | 2 | done: 2, which answers your earlier call as well

a conflict says that an attempt got through
weekly | conflict | unknown: its key is on record for another request: new field

what the check rejects stops nothing, and takes no answer
bad weekly | silent | BAD; UNKNOWN
bad | 1 | BAD
bad daily | | BAD; OPEN done: 1
daily bad daily | 2 3 | done: 2; BAD; done: 3

a mistake of `send` is silence
weekly | None | unknown: no answer (TypeError)
daily | empty | OPEN unknown: no answer (TypeError), and has to come first

a turn without calls takes no answer
weekly | silent | UNKNOWN
 | |
weekly | 1 | done: 1, which answers your earlier call as well"""
SILENT = TimeoutError("key")
UNKNOWN = "unknown: no answer (TimeoutError)"
OPEN = "not sent: your earlier call 'weekly' is "
HEARD = {"silent": SILENT, "429": "429", "None": None, "empty": "", "conflict": "!"}


class Stop(BaseException):
    """What ends a run in mid-turn, as a cancelled task does."""


class Steps(LabTest):
    runner = runner

    def setUp(self) -> None:
        super().setUp()
        self.start_over()

    def start_over(self) -> None:
        self.notes = open_notes(":memory:", self.runner)
        self.addCleanup(self.notes.close)
        self.sent, self.now = [], 0

    def check(self, request: str) -> float:
        if request == "bad":
            raise ValueError("no such tool")
        return 60 if request == "weekly" else 30

    def take(self, turn: str, *calls: str, heard: tuple = ()) -> "list[str]":
        """Take a turn whose sends hear this; return the outcomes that are told."""
        left = list(heard)

        def send(key: str, request: str) -> object:
            state = self.runner.read(self.notes, "key = ?", key)[0]["state"]
            self.assertEqual((state, self.notes.in_transaction), ("sent", False))
            self.sent.append((key, request))
            if not left:
                raise Stop("nothing was to be sent")
            answer = left.pop(0)
            if answer in ("429", "\ud800"):
                raise self.runner.Rejected(answer)
            if answer == "!":
                raise self.runner.Conflict("new field")
            if isinstance(answer, BaseException):
                raise answer
            return answer

        with mock.patch("time.time", lambda: self.now):
            texts = self.runner.take_turn(
                self.notes, turn, (call for call in calls), self.check, send
            )
        self.assertEqual(left, [], "all of it was heard")
        return [text.split(". ")[0] for text in texts]

    def test_each_turn_sends_and_tells_what_it_should(self) -> None:
        for talk in TALKS.split("\n\n"):
            self.start_over()
            rule, *turns = talk.split("\n")
            for number, turn in enumerate(turns):
                calls, heard, told = (part.split() for part in turn.split("|"))
                told = " ".join(told).replace("OPEN ", OPEN).replace("BAD", BAD)
                told = (
                    told.replace("LATER", "and has to come first")
                    .replace("UNKNOWN", UNKNOWN)
                    .split("; ")
                    if told
                    else []
                )
                hears = [HEARD[word] if word in HEARD else int(word) for word in heard]
                with self.subTest(rule, turn=turn):
                    self.assertEqual(self.take(str(number), *calls, heard=hears), told)
                    self.assertEqual(self.take(str(number), *calls), told, "again")

    def test_what_cannot_be_stored_is_escaped(self) -> None:
        odd, reason = self.take("a", "\udcff", "weekly", heard=("\ud800",))
        self.assertRegex(odd, r"^rejected: UnicodeEncodeError")
        self.assertEqual(reason, r"rejected: \ud800")

    def test_a_key_goes_out_while_it_is_surely_valid(self) -> None:
        for request, age, goes in (
            ("weekly", 0, 1),
            ("weekly", 59, 1),
            ("weekly", 60, 0),
            ("weekly", -1, 0),
            ("daily", 29, 1),
            ("daily", 30, 0),
        ):
            self.start_over()
            self.take("a", request, heard=(SILENT,))
            self.now = age / 2
            self.take("b", request, heard=(SILENT,) if age >= 0 else ())
            self.now = age
            (told,) = self.take("c", request, heard=(1,) * goes)
            self.assertEqual(len(set(self.sent)), 1)
            self.assertEqual("its key may have expired" in told, not goes)

    def test_an_interrupted_turn_goes_on(self) -> None:
        """First what was sent without an answer, then what was not sent yet."""
        calls = ("daily", "weekly", "monthly")
        with self.assertRaises(Stop):
            self.take("a", *calls, heard=(1, Stop()))
        with self.assertRaisesRegex(RuntimeError, "before 'b', take 'a' again"):
            self.take("b", "daily")
        with self.assertRaisesRegex(ValueError, "turn 'a' had other calls"):
            self.take("a", *calls[1:])
        (inflight,) = self.runner.read(self.notes, "state = 'sent'")
        with self.assertRaisesRegex(ValueError, "no unknown operation"):
            self.runner.decide(self.notes, inflight["key"], "not done")
        told = self.take("a", *calls, heard=(2, 3))
        self.assertEqual(told, ["done: 1", "done: 2", "done: 3"])
        self.assertEqual(self.sent[1], self.sent[2])

    def test_a_turn_that_cannot_come_again_is_given_up(self) -> None:
        with self.assertRaises(Stop):
            self.take("a", "weekly", "daily", heard=(Stop(),))
        self.runner.tell(self.notes, "a")
        self.runner.tell(self.notes, "a")  # and once more, which changes nothing
        waits = f"{OPEN}unknown: no answer, and has to come first"
        self.assertEqual(
            self.take("a", "weekly", "daily"), ["unknown: no answer", waits]
        )
        self.assertEqual(self.take("b", "daily", heard=(1,)), [f"{OPEN}done: 1"])
        self.runner.plan(self.notes, "c", ["daily"], self.check)
        self.runner.tell(self.notes, "c")
        self.assertEqual(self.take("c", "daily"), ["not sent: its turn was given up"])
        self.assertEqual(self.take("d", "daily", heard=(2,)), ["done: 2"])

    def test_a_person_decides_what_stays_unknown(self) -> None:
        second = "unknown: a second call may make another"
        answers = "done: 7, which answers your earlier call as well"
        for found, told in (
            ("done: 7", answers),
            ("not done", f"{OPEN}not done"),
            (second, OPEN + second),
        ):
            self.start_over()
            self.take("a", "weekly", heard=(SILENT,))
            (note,) = self.runner.read(self.notes, self.runner.UNKNOWN)
            self.assertEqual((note["heard"], note["first_sent"]), (UNKNOWN, 0))
            with self.assertRaisesRegex(ValueError, "done, not done or unknown"):
                self.runner.decide(self.notes, note["key"], "perhaps")
            self.runner.decide(self.notes, note["key"], found)
            with self.assertRaisesRegex(ValueError, "no unknown operation"):
                self.runner.decide(self.notes, note["key"], found)
            self.assertEqual(self.take("b", "weekly"), [told])
            self.assertEqual(self.take("c", "weekly", heard=(8,)), ["done: 8"])

    def test_a_long_request_is_named_briefly_and_an_answer_is_not_cut(self) -> None:
        self.take("a", "w" * 1000, heard=(SILENT,))
        (waits,) = self.take("b", "daily", heard=("x" * 1000,))
        self.assertRegex(waits, "^not sent: your earlier call 'w{79} is done: x{1000}$")

    def test_a_decision_stands_whatever_is_heard_then(self) -> None:
        self.take("a", "weekly", heard=(SILENT,))

        def send(key: str, request: str) -> int:
            self.runner.decide(self.notes, key, "done: 7")
            raise SILENT

        with mock.patch("time.time", lambda: 0):
            told = self.runner.take_turn(self.notes, "b", ["weekly"], self.check, send)
        self.assertRegex(told[0], "^done: 7, which answers")

    def test_any_rows_and_the_default_isolation_will_do(self) -> None:
        self.notes.row_factory = lambda *_: None
        self.notes.isolation_level = ""
        self.assertEqual(
            self.take("a", "weekly", "daily", heard=(1, 2)), ["done: 1", "done: 2"]
        )

    def test_each_silence_is_logged(self) -> None:
        logging.disable(logging.NOTSET)
        self.addCleanup(logging.disable)
        for heard in (SILENT, None):
            with mock.patch.object(self.runner.LOG, "exception") as log:
                self.take(repr(heard), "weekly", heard=(heard,))
            log.assert_called_once()

    def test_the_notes_refuse_what_makes_no_sense(self) -> None:
        self.take("a", "weekly", heard=(1,))
        for change in (
            "INSERT INTO notes SELECT 'b', 0, '', key, 1, state, '', 0, '' FROM notes",
            "INSERT INTO notes SELECT turn, 0, '', 'k', 1, state, '', 0, '' FROM notes",
            "UPDATE notes SET state = 'withheld'",
            "UPDATE notes SET retention = NULL",
        ):
            with self.assertRaises(sqlite3.IntegrityError, msg=change):
                self.notes.execute(change)

    def test_whoever_opened_the_notes_has_the_lock(self) -> None:
        path = self.folder / "notes"
        open_notes(path, self.runner).close()
        locked = self.assertRaisesRegex(sqlite3.OperationalError, "locked")
        with closing(sqlite3.connect(path, timeout=0)) as other:
            with closing(open_notes(path, self.runner)), locked:
                other.executescript(self.runner.NOTES)
            other.executescript(self.runner.NOTES)


# A rule | a line of the runner | what breaks the rule.
BROKEN = r"""
sent is noted before the send | notes.execute(sent, ( | str((sent,
that is committed | with notes:  # before the send | if True:  # before the send
the age | hear = "UPDATE notes SET | hear = "UPDATE notes SET first_sent=60,
no key out of the future | elif not 0 <= time | elif not -9 <= time
the retention's end | < note["retention"] | <= note["retention"]
a retention each | retention = check(request) | retention = check(request) and 60
a conflict is no answer | except Conflict as | except ZeroDivisionError as
only success after a silence | if note["state"] == "sent": | if False:
a rejection is an answer | if note["state"] == "sent": | if True:
nothing behind a silence | break  # the calls | pass  # the calls
nothing new while one is unknown | read(notes, EARLIER, turn) or | [] or
one operation answers one call | earlier = None  # one | pass  # one
one turn at a time | read(notes, "said IS NULL") | ()
a turn keeps its calls | != [*map(storable, calls)] | == 0
a turn that was told is not sent | if any(note["said"] is None for | if any(True for
nor told anew | f"said IS NULL AND {OF_TURN}" | OF_TURN
a successor goes on behind an answer | return True | return False
no decision in flight | AND said IS NOT NULL" | "
none on what is known | "state = 'sent' AND said | "said
none in other words | not in ("done" | in ("dome"
an answer is told once | notes.execute(told) | pass
an equal call has it | if equal and first | if False and first
a finding is no answer | if equal and first["heard"].startswith("done"): | if equal:
both are one | ", and both are one" if equal else | "" +
a turn is given up | if first is None: | if False:
a check stops one call only | except Exception as reason: | except ZeroDivisionError:
every text can be stored | "utf-8", "backslashreplace" | "utf-8"
an int is an answer | type(answer) is int or | False or
None is none | if not (type(answer) | if False and not (type(answer)
each silence is logged | LOG.exception( | str.format(
rows of any kind | cursor.row_factory = Row | pass
a brief request | {first['request']!r:.80} | {first['request']!r}
a person's decision stands | AND state='sent'" | "
an expired key is told | notes.execute("UPDATE notes SET heard=? | pass  # "
the lock | BEGIN EXCLUSIVE; | BEGIN;
it is kept | PRAGMA locking_mode = EXCLUSIVE; | PRAGMA locking_mode;
a key once | key TEXT NOT NULL UNIQUE | key TEXT NOT NULL
a call once | PRIMARY KEY (turn, place) | CHECK (1)
four states | 'ended', 'closed') | 'ended', 'closed', 'withheld')
a retention at least | retention REAL NOT NULL | retention REAL
all notes or none | notes.execute("BEGIN")  # all notes | pass  # all notes
all texts or none | notes.execute("BEGIN")  # all texts | pass  # all texts
"""


class BrokenRules(LabTest):
    def test_every_broken_rule_is_seen(self) -> None:
        source, path = RUNNER.read_text(encoding="utf-8"), self.folder / "broken.py"
        for row in BROKEN.strip().splitlines():
            rule, *edit = row.split(" | ")
            # Only a kill between two statements shows that these belong together.
            case = RunnerKilled if rule.endswith("or none") else Steps
            result = unittest.TestResult()
            with self.subTest(rule):
                path.write_text(edited(source, edit), encoding="utf-8")
                for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
                    test.runner, test.path = load(path), path
                    test.run(result)
                self.assertFalse(result.wasSuccessful())


if __name__ == "__main__":
    unittest.main()
