"""What does somebody see who runs the lab, or makes one attempt, from a terminal?"""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import unittest
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.support import (
    ERROR_LINE,
    FIRST_JOB,
    LAB,
    REJECTED,
    ROOT,
    LabTest,
    environment,
    posix,
    run,
)

OUTPUT = """\
| # | First call    | Next attempt           | Exits    | Jobs   | Answer   |
|---|---------------|------------------------|----------|--------|----------|
| 1 | before commit | same key, same report  | 17 -> 0  | 0 -> 1 | job 1    |
| 2 | after commit  | same key, same report  | 18 -> 0  | 1 -> 1 | job 1    |
| 3 | after commit  | new key, same report   | 18 -> 0  | 1 -> 2 | job 2    |
| 4 | after commit  | same key, other report | 18 -> 20 | 1 -> 1 | rejected |
| 5 | no crash      | new key, same report   | 0 -> 0   | 1 -> 2 | job 2    |

PASS: exit status, stdout, stderr and all rows are as expected after each call.
Cases 2 and 3 differ only in the key: same key, one job; new key, two jobs.
Cases 3 and 5 end in the same rows: afterwards nothing in the database tells an
accidental duplicate from an intended second job.
"""
NOT_A_FILE = "error: save this as a file first: its workers run it\n"


def unread(*arguments: object) -> "tuple[int, str]":
    """Run Python with nobody to read its stdout; return exit status and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    return done.returncode, done.stderr.decode()


def shell_run(shell: str, command: str) -> "subprocess.CompletedProcess[str]":
    """Run `command` in a shell; return its exit status and both streams as text."""
    words = [shell, "-c", command]
    return subprocess.run(words, check=False, capture_output=True, text=True)


class Lab(LabTest):
    def outcome(self, *command: object, **options: object) -> "tuple[int, str, str]":
        done = run(*command, **options)
        return done.returncode, done.stdout, done.stderr

    def test_the_five_cases_pass_and_the_table_says_what_was_seen(self) -> None:
        """Five cases, ten real workers: the table, PASS, two findings, exit 0."""
        self.assertEqual(self.outcome(LAB), (0, OUTPUT, ""))

    def test_the_output_can_be_pasted_anywhere(self) -> None:
        """The output is ASCII and at most 80 columns wide; so is the help."""
        for shown in (OUTPUT, run(LAB, "--help").stdout):
            self.assertTrue(shown.isascii())
            self.assertLessEqual(max(map(len, shown.splitlines())), 80)

    def test_keep_leaves_five_databases_and_says_how_to_look(self) -> None:
        """--keep DIR leaves a database for each case, and a command to look into one."""
        kept = self.folder / "kept"
        done = run(LAB, "--keep", kept)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue(done.stdout.startswith(f"{OUTPUT}\ncase-1.sqlite to case-5"))
        self.assertIn(ascii(str(kept)), done.stdout)
        names = [f"case-{number}.sqlite" for number in range(1, 6)]
        self.assertEqual(sorted(os.listdir(kept)), names)
        receipts = [("op-a", "weekly", 1), ("op-b", "weekly", 2)]
        two_jobs = ([(1, "weekly"), (2, "weekly")], receipts)
        expected = [FIRST_JOB, FIRST_JOB, two_jobs, FIRST_JOB, two_jobs]
        self.assertEqual([self.rows(str(kept / name)) for name in names], expected)
        command = done.stdout.splitlines()[-1]
        self.assertTrue(command.startswith('python -c "') and command.endswith('"'))
        code = command[len('python -c "') : -1]
        self.assertIn("VALUES('op-b','weekly',2)", run("-c", code, cwd=kept).stdout)

    def test_keep_on_what_exists_is_bad_usage_and_touches_nothing(self) -> None:
        """--keep on a directory or file that exists: exit 2, and nothing is touched."""
        (self.folder / "full").mkdir()
        (self.folder / "full" / "case-1.sqlite").write_text("mine")
        (self.folder / "file").write_text("mine")
        for name in ("full", "file"):
            status, shown, error = self.outcome(LAB, "--keep", self.folder / name)
            self.assertEqual((status, shown), (2, ""))
            self.assertRegex(error, r"\Ausage: .*\n.*error: --keep: '.*' exists\n\Z")
        self.assertEqual((self.folder / "full" / "case-1.sqlite").read_text(), "mine")
        self.assertEqual(os.listdir(self.folder / "full"), ["case-1.sqlite"])
        self.assertEqual((self.folder / "file").read_text(), "mine")

    def test_keep_needs_no_temporary_folder(self) -> None:
        """Where no temporary folder can be made, --keep works; without it, one line."""
        code = "import sys, tempfile, retry_lab; tempfile.tempdir = '/no/such/folder'; "
        code += "sys.exit(retry_lab.main(sys.argv[1:]))"
        kept = self.folder / "kept"
        done = run("-B", "-c", code, "--keep", kept, cwd=ROOT)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        status, shown, error = self.outcome("-B", "-c", code, cwd=ROOT)
        self.assertEqual((status, shown), (1, ""))
        self.assertRegex(error, ERROR_LINE)

    def test_a_failed_case_is_kept_to_be_looked_into(self) -> None:
        """When a case fails or is void, --keep leaves its database all the same."""
        lab = self.edited_lab(("os._exit(18)", "pass"))
        kept = self.folder / "kept"
        self.assertEqual(run(lab, "--keep", kept).returncode, 1)
        self.assertEqual(len(os.listdir(kept)), 5)

    @posix
    def test_a_run_that_fails_leaves_no_kept_directory(self) -> None:
        """An error ends the run in one line and without DIR, so that it can be repeated."""
        kept = self.folder / "kept"
        shell = f'ulimit -f 1; exec "{sys.executable}" "{LAB}" --keep "{kept}"'
        done = shell_run("sh", shell)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, ERROR_LINE)
        self.assertIn("case-1.sqlite", done.stderr)
        self.assertFalse(kept.exists())
        self.assertEqual(run(LAB, "--keep", kept).returncode, 0)

    def test_keep_below_a_missing_directory_makes_none(self) -> None:
        """--keep below a directory that is not there: one clear line, nothing made."""
        for place in (self.folder / "no" / "kept", ""):
            status, shown, error = self.outcome(LAB, "--keep", place)
            self.assertEqual((status, shown), (1, ""))
            self.assertRegex(error, ERROR_LINE)
        self.assertEqual(os.listdir(self.folder), [])

    def test_help_explains_the_lab_the_worker_and_the_exit_statuses(self) -> None:
        """--help names the option, the worker call, each exit status and an example."""
        for flags in ([], ["-OO"]):
            status, shown, error = self.outcome(*flags, LAB, "--help")
            self.assertEqual((status, error), (0, ""))
            self.assertIn("\n\nA call that creates a job got no answer", shown)
            self.assertRegex(shown, "\n  --keep DIR +make DIR, leave databases there\n")
            for said in ("worker DATABASE KEY REPORT FAULT", "example:"):
                self.assertIn(said, shown)
            for said in (
                "before_commit",
                "after_commit",
                "17 died",
                "18 died",
                "20 conflict",
            ):
                self.assertIn(said, shown)

    def test_an_unknown_option_or_word_is_bad_usage(self) -> None:
        """What the lab does not know: exit 2, and its usage."""
        for words in (["--kept", "x"], ["works"], ["--keep"]):
            status, shown, error = self.outcome(LAB, *words)
            self.assertEqual((status, shown), (2, ""))
            self.assertTrue(error.startswith("usage: retry_lab.py [-h] [--keep DIR]\n"))
            self.assertNotIn("Traceback", error)


class Starting(LabTest):
    def passes(self, *command: object, **options: object) -> str:
        done = run(*command, **options)
        self.assertEqual((done.returncode, done.stdout), (0, OUTPUT), done.stderr)
        return done.stderr

    def test_it_runs_from_any_directory_and_by_a_relative_path(self) -> None:
        """The lab runs from any directory, by a full or a relative path."""
        self.assertEqual(self.passes(LAB, cwd=self.folder), "")
        self.assertEqual(self.passes(LAB.name, cwd=ROOT), "")
        self.assertEqual(self.passes("-m", "retry_lab", cwd=ROOT), "")

    def test_it_runs_under_every_python_variable_and_flag(self) -> None:
        """No PYTHON* variable and no -O changes what the lab prints."""
        quiet = "DEVMODE=1 WARNINGS=error OPTIMIZE=2 IOENCODING=cp1252 UNBUFFERED=1"
        for names in (quiet, "VERBOSE=1", "MALLOCSTATS=1"):
            pairs = [f"PYTHON{name}".split("=") for name in names.split()]
            settings = environment(**dict(pairs))
            done = run(LAB, env=settings)
            with self.subTest(names):
                # CPython 3.12.1 crashes under MALLOCSTATS, whatever it has run.
                status = run("-c", "pass", env=settings).returncode
                self.assertEqual((done.returncode, done.stdout), (status, OUTPUT))
                if names == quiet:
                    self.assertEqual(done.stderr, "")
        self.assertEqual(self.passes("-O", LAB), "")

    def test_a_copy_under_another_name_and_path_runs_alone(self) -> None:
        """One file, copied to a path with spaces under another name, is the whole lab."""
        home = self.folder / "a path with spaces"
        home.mkdir()
        shutil.copy(LAB, home / "retry-lab.py")
        self.assertEqual(self.passes(home / "retry-lab.py"), "")
        self.assertEqual(self.passes("retry-lab.py", cwd=home), "")
        self.assertEqual(os.listdir(home), ["retry-lab.py"])
        self.assertIn(
            "usage: retry-lab.py worker", run(home / "retry-lab.py", "worker").stderr
        )

    def test_without_a_file_it_asks_to_be_saved_and_runs_nothing(self) -> None:
        """Pasted with no file behind it: one clear line, exit 1, nothing run."""
        source = LAB.read_text(encoding="utf-8")
        piped = run("-", stdin=None, input=source, cwd=self.folder)
        cell = "import sys; exec(compile(sys.stdin.read(), '<cell>', 'exec'))"
        pasted = run("-c", cell, stdin=None, input=source, cwd=self.folder)
        for done in (piped, pasted):
            self.assertEqual(
                (done.returncode, done.stdout, done.stderr), (1, "", NOT_A_FILE)
            )
        self.assertEqual(os.listdir(self.folder), [])

    def test_importing_it_runs_nothing(self) -> None:
        """Imported, under whatever name, it prints nothing and starts nothing."""
        shutil.copy(LAB, self.folder / "Lab.py")
        for name, home in (("retry_lab", ROOT), ("Lab", self.folder)):
            done = run("-B", "-c", f"import {name}", cwd=home)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_a_reader_that_leaves_early_draws_no_traceback(self) -> None:
        """Piped into head it is quiet; with no reader at all it says so in one line."""
        command = [sys.executable, str(LAB)]
        for settings in (environment(), environment(PYTHONUNBUFFERED="1")):
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen(command, env=settings, **streams) as lab:
                self.assertTrue(lab.stdout.readline().startswith(b"| # |"))
                lab.stdout.close()
                self.assertEqual(lab.stderr.read(), b"")
            self.assertEqual(lab.returncode, 0)
        status, error = unread(LAB)
        self.assertEqual(status, 1)
        self.assertRegex(error, ERROR_LINE)

    def test_code_run_from_the_saved_file_works(self) -> None:
        """Compiled and run from the saved file, with no __file__, it works."""
        code = "exec(compile(open('retry_lab.py').read(), 'retry_lab.py', 'exec'), "
        code += "{'__name__': '__main__'})"
        self.assertEqual(self.passes("-c", code, cwd=ROOT), "")

    def test_a_python_that_can_not_say_where_it_is_is_an_error(self) -> None:
        """With no sys.executable no worker can be started: one line says so."""
        code = "import sys, retry_lab; sys.executable = ''; retry_lab.main([])"
        done = run("-B", "-c", code, cwd=ROOT)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"\Aerror: [^\n]*its own path[^\n]*\n\Z")

    @posix
    def test_a_parent_that_ignores_its_children_changes_nothing(self) -> None:
        """Started by a program that ignores SIGCHLD, it sees every exit status."""
        shell = f"trap '' CHLD; exec '{sys.executable}' '{LAB}'"
        done = shell_run("bash", shell)
        self.assertEqual((done.returncode, done.stdout), (0, OUTPUT))

    @posix
    def test_a_closed_stream_is_an_error(self) -> None:
        """Started with stdout or stderr closed: exit 1, and no answer goes astray."""
        database = self.new_database()
        words = f'"{sys.executable}" "{LAB}" worker "{database}" op-a weekly'
        for call in (f'"{sys.executable}" "{LAB}"', f"{words} none", f"{words} never"):
            for closed in (">&-", "2>&-"):
                command = ["sh", "-c", f"{call} {closed}"]
                done = subprocess.run(command, capture_output=True, check=False)
                self.assertEqual((done.returncode, done.stdout), (1, b""))
                said = b"error: " if closed == ">&-" else b""
                self.assertEqual(
                    (done.stderr[:7], done.stderr.count(b"\n")), (said, len(said) // 7)
                )
        self.assertEqual(self.rows(database), ([], []))


class Leftovers(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.temporary = self.folder / "temporary"
        self.temporary.mkdir()
        place = str(self.temporary)
        self.settings = environment(TMPDIR=place, TEMP=place, TMP=place)

    def test_a_run_leaves_nothing_behind(self) -> None:
        """After a run, temporary and working directory are as empty as before."""
        (self.folder / "work").mkdir()
        self.assertEqual(
            run(LAB, env=self.settings, cwd=self.folder / "work").returncode, 0
        )
        self.assertEqual(
            os.listdir(self.temporary) + os.listdir(self.folder / "work"), []
        )


class Stopped(LabTest):
    """A worker hangs, and says so through a named pipe; then the lab is stopped."""

    def stopped(self, number: int, send: "Callable[[int, int], None]") -> None:
        os.mkfifo(self.folder / "pipe")
        answer = "    print(job_id, flush=True)\n"
        hang = f"""\
    with open({str(self.folder / "pipe")!r}, "w") as pipe:
        print("hangs", file=pipe, flush=True)
        __import__("time").sleep(30)
        print("lives on", file=pipe)
"""
        lab = self.edited_lab((answer, hang + answer))
        temporary = self.folder / "temporary"
        temporary.mkdir()
        started = subprocess.Popen(
            [sys.executable, lab],
            env=environment(TMPDIR=str(temporary)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with open(self.folder / "pipe") as pipe:
            self.assertEqual(pipe.readline(), "hangs\n")
            send(started.pid, number)
            shown, error = started.communicate()
            self.assertEqual((shown, error), ("", "error: interrupted\n"))
            self.assertEqual(started.returncode, 1)
            # The pipe has ended, so the worker is gone; and it was the only one.
            self.assertEqual(pipe.read(), "")
        self.assertEqual(os.listdir(temporary), [])

    def setUp(self) -> None:
        super().setUp()
        # Whoever runs the tests may ignore these signals, and would hand that down.
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                before = signal.signal(number, signal.default_int_handler)
                self.addCleanup(signal.signal, number, before)

    @posix
    def test_ctrl_c_ends_the_run_at_once(self) -> None:
        """Ctrl-C, which strikes the worker too: one line, exit 1, nothing left."""
        self.stopped(signal.SIGINT, os.killpg)

    @posix
    def test_an_interrupt_of_the_lab_alone_ends_its_worker(self) -> None:
        """SIGINT to the lab alone ends the hung worker and starts no other."""
        self.stopped(signal.SIGINT, os.kill)

    @posix
    def test_a_request_to_terminate_ends_it_like_ctrl_c(self) -> None:
        """SIGTERM, as by a cancelled CI job: one line, exit 1, nothing left."""
        self.stopped(signal.SIGTERM, os.kill)

    @posix
    def test_a_closed_terminal_ends_it_like_ctrl_c(self) -> None:
        """SIGHUP, as by a closed terminal: one line, exit 1, nothing left."""
        self.stopped(signal.SIGHUP, os.kill)

    @posix
    def test_a_hang_up_that_nohup_ignores_stays_ignored(self) -> None:
        """Started by nohup, which ignores SIGHUP, it goes on to its end."""
        answer = "    print(job_id, flush=True)\n"
        hang_up = "    import signal\n    os.kill(os.getppid(), signal.SIGHUP)\n"
        lab = self.edited_lab((answer, hang_up + answer))
        done = shell_run("sh", f"trap '' HUP; exec '{sys.executable}' '{lab}'")
        self.assertEqual((done.returncode, done.stdout), (0, OUTPUT), done.stderr)


class Worker(LabTest):
    def test_a_conflict_changes_no_row(self) -> None:
        """The same key with another report: exit 20, its name on stdout, no row changes."""
        database = self.new_database()
        self.call(database, "op-a")
        for report in ("daily", "weekl", "weekly ", "Weekly", ""):
            rejected = self.call(database, "op-a", report)
            self.assertEqual(rejected, REJECTED)
        self.assertEqual(self.rows(database), FIRST_JOB)

    def test_keys_are_compared_byte_for_byte(self) -> None:
        """Case, spaces, leading zeros, accents and length all make another key."""
        database = self.new_database()
        keys = [
            "op-a",
            "op-A",
            "op-a ",
            " op-a",
            "7",
            "007",
            "7.0",
            "-x",
            "--help",
            "k" * 5000,
        ]
        if sys.getfilesystemencoding() == "utf-8":
            keys += ["caf\u00e9", "cafe\u0301"]
        for round_of_calls in ("first", "replay"):
            for number, key in enumerate(keys, 1):
                with self.subTest(round_of_calls, key=key[:9]):
                    self.assertEqual(self.call(database, key), (0, f"{number}\n", ""))
        receipts = [(key, "weekly", number) for number, key in enumerate(keys, 1)]
        self.assertEqual(self.rows(database)[1], receipts)

    def test_bad_usage_is_one_line_and_writes_nothing(self) -> None:
        """A wrong number of words, an unknown fault, an empty key: exit 2 and the usage."""
        database = self.new_database()
        for words in (
            [],
            [database],
            [database, "op-a", "weekly"],
            [database, "op-a", "weekly", "none", "more"],
            [database, "op-a", "weekly", "never"],
            [database, "op-a", "weekly", ""],
            [database, "op-a", "weekly", "NONE"],
            [database, "", "weekly", "none"],
        ):
            with self.subTest(words=words[1:]):
                done = run(LAB, "worker", *words)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                usage = r"\Ausage: retry_lab.py worker DATABASE KEY REPORT [^\n]+\n\Z"
                self.assertRegex(done.stderr, usage)
        self.assertEqual(self.rows(database), ([], []))

    def is_an_error(self, database: object, key: str = "op-a", lab: Path = LAB) -> str:
        status, answer, error = self.call(str(database), key, lab=lab)
        self.assertEqual((status, answer), (1, ""))
        self.assertRegex(error, ERROR_LINE)
        return error

    def test_a_missing_database_is_an_error_and_no_file_appears(self) -> None:
        """No such file, no such directory, no name, :memory: : exit 1, no file appears."""
        for name in ("none.sqlite", os.path.join("no", "none.sqlite")):
            self.assertIn(
                name.rsplit(os.sep, 1)[-1], self.is_an_error(self.folder / name)
            )
        done = run(LAB, "worker", ":memory:", "op-a", "weekly", "none", cwd=self.folder)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.is_an_error("")
        self.assertEqual(os.listdir(self.folder), [])

    def test_what_is_no_database_is_an_error_and_stays_as_it_is(self) -> None:
        """A directory, a text, an empty file, missing tables: exit 1, nothing written."""
        (self.folder / "directory").mkdir()
        text, empty = self.folder / "text", self.folder / "empty"
        text.write_text("not a database, and longer than a header of SQLite is" * 9)
        empty.touch()
        bare = self.folder / "bare.sqlite"
        with closing(sqlite3.connect(bare)) as connection:
            connection.execute(
                "CREATE TABLE jobs (id INTEGER PRIMARY KEY, report TEXT)"
            )
        before = text.read_bytes(), bare.read_bytes()
        self.is_an_error(self.folder / "directory")
        self.assertIn("not a database", self.is_an_error(text))
        self.assertIn("no such table", self.is_an_error(empty))
        self.assertIn("no such table", self.is_an_error(bare))
        self.assertEqual((text.read_bytes(), bare.read_bytes()), before)
        self.assertEqual(empty.read_bytes(), b"")
        names = ["bare.sqlite", "directory", "empty", "text"]
        self.assertEqual(sorted(os.listdir(self.folder)), names)

    def test_a_lock_held_past_the_wait_is_an_error_and_writes_nothing(self) -> None:
        """Locked for longer than the wait: exit 1, one line, nothing written."""
        database = self.new_database()
        lab = self.edited_lab(("timeout=5", "timeout=0"))
        with closing(sqlite3.connect(database, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            self.assertIn("locked", self.is_an_error(database, lab=lab))
        self.assertEqual(self.rows(database), ([], []))

    def test_a_row_that_makes_no_sense_is_an_error(self) -> None:
        """A job id that is no number, or a table of another shape: exit 1, one line."""
        receipts = "CREATE TABLE receipts (key, report, job_id);"
        jobs = "CREATE TABLE jobs (id INTEGER PRIMARY KEY, report TEXT);"
        record = "INSERT INTO receipts VALUES ('op-a', 'weekly', {});"
        for number, schema in enumerate(
            (
                jobs + receipts + record.format("'x'"),
                jobs + receipts + record.format("NULL"),
                jobs + receipts + record.format("2.5"),
                receipts + "CREATE TABLE jobs (title);",
                receipts + "CREATE VIEW jobs AS SELECT 1 AS report;",
                jobs + "CREATE TABLE receipts (key, report, job_id, more);",
            )
        ):
            name = f"{number}.sqlite"
            database = self.new_database(name, schema)
            self.assertIn(name, self.is_an_error(database))

    def test_an_error_about_a_file_names_it(self) -> None:
        """What SQLite can't open, read or lock is named in the line that says so."""
        deep = self.folder.joinpath(*["d" * 100] * 6)
        deep.mkdir(parents=True)
        (deep / "deep.sqlite").touch()
        self.assertIn("deep.sqlite", self.is_an_error(deep / "deep.sqlite"))

    @posix
    def test_an_undecodable_key_is_an_error_and_never_a_conflict(self) -> None:
        """A key that is no UTF-8 is an error, exit 1: not a conflict, not a job."""
        database = self.new_database()
        self.assertIn("surrogates", self.is_an_error(database, os.fsdecode(b"op-\xff")))
        self.call(database, "op-a")
        self.assertIn(
            "surrogates", self.is_an_error(database, os.fsdecode(b"op-a\xff"))
        )
        report = self.call(database, "op-b", os.fsdecode(b"weekly\xff"))
        self.assertEqual(report[:2], (1, ""))
        self.assertEqual(self.rows(database), FIRST_JOB)

    @posix
    def test_an_answer_nobody_takes_is_an_error_in_one_line(self) -> None:
        """Nobody reads the answer: exit 1 and one line, though the job is made."""
        database = self.new_database()
        status, error = unread(LAB, "worker", database, "op-a", "weekly", "none")
        self.assertEqual(status, 1)
        self.assertRegex(error, ERROR_LINE)
        self.assertEqual(self.rows(database), FIRST_JOB)


if __name__ == "__main__":
    unittest.main()
