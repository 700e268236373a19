"""What does somebody see who runs the lab, or makes one attempt, from a terminal?"""

import os
import shutil
import signal
import subprocess
import sys
import unittest
from pathlib import Path

import retry_lab
from tests.support import (
    EMPTY,
    ERROR_LINE,
    FIRST_JOB,
    LAB,
    REJECTED,
    ROOT,
    LabTest,
    end,
    environment,
    posix,
    run,
)
from tests.watch import LIMIT, watched

USAGE = r"\Ausage: [^\n]+ see --help\n\Z"
SAVED = "exec(compile(open('retry_lab.py').read(), 'retry_lab.py', 'exec'))"
PRINT = "    print(job_id, flush=True)\n"  # where a worker answers


class TerminalTest(LabTest):
    """A test whose processes make their temporary files in a folder of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.temporary = self.folder / "temporary"
        self.temporary.mkdir()
        self.kept = self.folder / "kept"
        names = ("TMPDIR", "TEMP", "TMP")
        self.settings = environment(**dict.fromkeys(names, str(self.temporary)))

    def ends(self, *command: object, **options: object) -> "tuple[int, str, str]":
        """Run Python on `command`; nothing temporary is left. Say how it ends."""
        done = run(*command, **{"env": self.settings, **options})
        self.assertEqual(os.listdir(self.temporary), [])
        return done.returncode, done.stdout, done.stderr

    def is_error(self, ended: "tuple[int, str, str]", said: str = "") -> None:
        """Check that a process ended with 1, one line on stderr, and `said` in it."""
        self.assertEqual(ended[:2], (1, ""))
        self.assertRegex(ended[2], ERROR_LINE)
        self.assertIn(said, ended[2])

    def is_bad_usage(self, ended: "tuple[int, str, str]") -> None:
        self.assertEqual(ended[:2], (2, ""))
        self.assertRegex(ended[2], USAGE)


class Lab(TerminalTest):
    def test_however_it_is_started_it_says_the_same(self) -> None:
        home = self.folder / "a path with spaces"
        home.mkdir()
        shutil.copy(LAB, home / "Lab 2.py")
        expected = (0, run(LAB).stdout, "")
        self.assertIn("\nPASS: ", expected[1])
        ways = [
            ([LAB], {"cwd": self.folder}),
            (["retry_lab.py"], {"cwd": ROOT}),
            (["-O", LAB], {}),
            (["-OO", LAB], {}),
            ([home / "Lab 2.py"], {}),
            (["Lab 2.py"], {"cwd": home}),
            (["-B", "-m", "retry_lab"], {"cwd": ROOT}),
            (["-c", SAVED], {"cwd": ROOT}),
            ([LAB], {"env": {**self.settings, "PYTHONUTF8": "0", "LC_ALL": "C"}}),
            ([LAB], {"env": {**self.settings, "PYTHONWARNINGS": "error"}}),
        ]
        for command, options in ways:
            with self.subTest(command=command, options=list(options)):
                self.assertEqual(self.ends(*command, **options), expected)
        self.assertEqual(os.listdir(home), ["Lab 2.py"])

    def test_what_else_writes_on_a_worker_s_stderr_changes_nothing(self) -> None:
        """A debugger leaves a note there, and a loader a warning."""
        lab = self.edited_lab((PRINT, PRINT + "    print('note', file=sys.stderr)\n"))
        self.assertEqual(self.ends(lab), self.ends(LAB))

    def test_help_is_the_docstring_and_never_none(self) -> None:
        help_text = f"{retry_lab.__doc__}\n"
        self.assertEqual(self.ends(LAB, "--help"), (0, help_text, ""))
        self.assertNotIn("None", self.ends("-OO", LAB, "--help")[1])
        for shown in (run(LAB).stdout, help_text):  # so it can be pasted anywhere
            self.assertTrue(shown.isascii())
            self.assertLessEqual(max(map(len, shown.splitlines())), 80)

    def test_keep_leaves_five_databases_and_says_how_to_look(self) -> None:
        status, shown, error = self.ends(LAB, "--keep", self.kept)
        self.assertEqual((status, error), (0, ""))
        self.assertIn(ascii(str(self.kept)), shown)
        receipts = [("op-a", "weekly", 1), ("op-b", "weekly", 2)]
        two_jobs = ([(1, "weekly"), (2, "weekly")], receipts)
        expected = [FIRST_JOB, FIRST_JOB, two_jobs, FIRST_JOB, two_jobs]
        names = [f"case-{number}.sqlite" for number in range(1, 6)]
        self.assertEqual(sorted(os.listdir(self.kept)), names)
        rows = [self.rows(str(self.kept / name)) for name in names]
        self.assertEqual(rows, expected)
        command = shown.splitlines()[-1]
        self.assertEqual((command[:11], command[-1]), ('python -c "', '"'))
        dump = self.ends("-c", command[11:-1], cwd=self.kept)[1]
        self.assertIn("VALUES('op-b','weekly',2)", dump)

    def test_keep_on_what_exists_is_bad_usage_and_touches_nothing(self) -> None:
        file = self.folder / "file"
        file.write_text("mine")
        self.kept.mkdir()
        for place in (file, self.kept):
            self.is_bad_usage(self.ends(LAB, "--keep", place))
        self.assertEqual((file.read_text(), os.listdir(self.kept)), ("mine", []))

    def test_a_failed_case_is_kept_to_be_looked_into(self) -> None:
        lab = self.edited_lab(("os._exit(18)", "pass"))
        self.assertEqual(self.ends(lab, "--keep", self.kept)[0], 1)
        self.assertEqual(len(os.listdir(self.kept)), 5)

    def test_bad_usage_is_one_line(self) -> None:
        for words in (["x"], ["--keep"], ["--keep", "x", "y"], ["--help", "x"], [""]):
            self.is_bad_usage(self.ends(LAB, *words, cwd=self.folder))
        self.assertEqual(os.listdir(self.folder), ["temporary"])

    def test_without_a_file_it_asks_to_be_saved(self) -> None:
        source = LAB.read_text(encoding="utf-8")
        cell = "import sys; exec(compile(sys.stdin.read(), '<cell>', 'exec'))"
        for command in (["-"], ["-c", cell]):
            ended = self.ends(*command, input=source, cwd=self.folder)
            self.is_error(ended, "save this as a file first")

    def test_it_closes_its_databases(self) -> None:
        """Windows could not remove the temporary folder otherwise."""
        steps: list[str] = []
        with watched(steps.append):
            retry_lab.observe(1, retry_lab.CASES[0], str(self.folder))
        self.assertEqual(steps[-1], "close")

    def test_a_worker_that_hangs_ends_the_run_in_one_line(self) -> None:
        hang = f"    __import__('time').sleep({LIMIT})\n"
        lab = self.edited_lab(("timeout=10", "timeout=1"), (PRINT, hang + PRINT))
        self.is_error(self.ends(lab, "--keep", self.kept), "case 1: a worker hung")
        self.assertFalse(self.kept.exists())

    def test_a_reader_that_leaves_early_draws_no_traceback(self) -> None:
        lab = self.start(sys.executable, str(LAB), env=self.settings)
        self.assertTrue(lab.stdout.readline().startswith("| # |"))
        lab.stdout.close()
        self.assertEqual(lab.stderr.read(), "")
        self.assertEqual(lab.wait(LIMIT), 0)

    @posix
    def test_an_answer_nobody_takes_is_an_error_in_one_line(self) -> None:
        """It may come after the COMMIT: then the job is there."""
        database = self.new_database()
        for call in ([], ["--help"], ["worker", database, "op-a", "weekly", "none"]):
            reader, writer = os.pipe()
            os.close(reader)
            command = [sys.executable, LAB, *call]
            done = subprocess.run(
                command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True
            )
            os.close(writer)
            self.is_error((done.returncode, "", done.stderr))
        self.assertEqual(self.rows(database), FIRST_JOB)

    @posix
    def test_a_run_that_fails_leaves_no_kept_directory(self) -> None:
        limited = f'ulimit -f 1; exec "{sys.executable}" "{LAB}" --keep "{self.kept}"'
        self.is_error(end(self.start("sh", "-c", limited, env=self.settings)))
        self.assertEqual(os.listdir(self.folder), ["temporary"])
        self.assertEqual(os.listdir(self.temporary), [])


@posix
class Stopped(TerminalTest):
    """A worker hangs, and says so through a named pipe; then the lab is stopped."""

    def setUp(self) -> None:
        super().setUp()
        # Whoever runs the tests may ignore these signals, and would hand that down.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, signal.default_int_handler)
            self.addCleanup(signal.signal, number, before)

    def test_it_ends_at_once_and_leaves_nothing(self) -> None:
        """By Ctrl-C, which strikes its worker too, or by a signal to it alone."""
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        hang = f"""\
    with open({str(pipe)!r}, "w") as pipe:
        print("hangs", file=pipe, flush=True)
        __import__("time").sleep(9)
        print("lives on", file=pipe)
"""
        lab = self.edited_lab((PRINT, hang + PRINT))
        for number, kill in (
            (signal.SIGINT, os.killpg),
            (signal.SIGINT, os.kill),
            (signal.SIGTERM, os.kill),
            (signal.SIGHUP, os.kill),
        ):
            with self.subTest(number=number, kill=kill.__name__):
                command = (sys.executable, str(lab), "--keep", str(self.kept))
                how = {"env": self.settings, "start_new_session": True}
                process = self.start(*command, **how)
                with open(pipe) as words:
                    self.assertEqual(words.readline(), "hangs\n")
                    kill(process.pid, number)
                    ended = end(process)
                    self.assertEqual(ended, (1, "", "error: interrupted\n"))
                    # The pipe has ended: the worker is gone, and was the only one.
                    self.assertEqual(words.read(), "")
                self.assertEqual(os.listdir(self.temporary), [])
                self.assertFalse(self.kept.exists())

    def test_what_its_parent_ignores_changes_nothing(self) -> None:
        """The hang-up that nohup ignores stays ignored, and children are waited for."""
        hang_up = "    import signal\n    os.kill(os.getppid(), signal.SIGHUP)\n"
        lab = self.edited_lab((PRINT, hang_up + PRINT))
        ignoring = """import os, signal, sys
for number in (signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, sys.argv[1]])"""
        self.assertEqual(self.ends("-c", ignoring, lab), self.ends(LAB))


class Worker(TerminalTest):
    def test_a_conflict_changes_no_row(self) -> None:
        database = self.new_database()
        self.call(database, "op-a")
        for report in ("daily", "weekl", "weekly ", "Weekly", ""):
            self.assertEqual(self.call(database, "op-a", report), REJECTED)
        self.assertEqual(self.rows(database), FIRST_JOB)

    def test_keys_are_compared_byte_for_byte(self) -> None:
        database = self.new_database()
        keys = ["op-a", "op-A", "op-a ", " op-a", "7", "007", "-x", "--help", "k" * 999]
        if sys.getfilesystemencoding() == "utf-8" and os.name == "posix":
            keys += ["caf\u00e9", "cafe\u0301"]
        for _ in ("create", "replay"):
            for number, key in enumerate(keys, 1):
                self.assertEqual(self.call(database, key), (0, f"{number}\n", ""))
        receipts = [(key, "weekly", number) for number, key in enumerate(keys, 1)]
        self.assertEqual(self.rows(database)[1], receipts)

    def test_bad_usage_is_one_line_and_writes_nothing(self) -> None:
        database = self.new_database()
        for words in (
            [],
            [database, "op-a", "weekly"],
            [database, "op-a", "weekly", "none", "more"],
            [database, "op-a", "weekly", "never"],
            [database, "op-a", "weekly", ""],
            [database, "", "weekly", "none"],
        ):
            with self.subTest(words=words[1:]):
                self.is_bad_usage(self.ends(LAB, "worker", *words))
        self.assertEqual(self.rows(database), EMPTY)

    def test_what_can_not_be_used_is_an_error_that_names_the_file(self) -> None:
        """And nothing is written, not even an empty file."""
        jobs = "CREATE TABLE jobs (id INTEGER PRIMARY KEY, report);"
        receipts = "CREATE TABLE receipts (key, report, job_id);"
        record = jobs + receipts + "INSERT INTO receipts VALUES ('op-a', 'weekly', {});"
        for name, schema in (
            ("bare.sqlite", jobs),
            ("text-id.sqlite", record.format("'x'")),
            ("null-id.sqlite", record.format("NULL")),
            ("half-id.sqlite", record.format("2.5")),
            ("title.sqlite", receipts + "CREATE TABLE jobs (title);"),
            ("view.sqlite", receipts + "CREATE VIEW jobs AS SELECT 1 AS report;"),
        ):
            self.new_database(name, schema)
        (self.folder / "empty").touch()
        (self.folder / "text").write_text("no database, and longer than a header" * 9)
        before = self.contents()
        for name in (*before, "none.sqlite", str(Path("no", "none")), "d" * 99):
            with self.subTest(name):
                self.is_error(self.call(str(self.folder / name), "op-a"), name[-4:])
        for directory in "", str(self.folder):
            self.is_error(self.call(directory, "op-a"))
        self.is_error(self.ends(LAB, "worker", ":memory:", "op-a", "weekly", "none"))
        self.assertEqual(self.contents(), before)

    def contents(self) -> "dict[str, bytes]":
        """Return what is in each file of the test's folder."""
        files = [path for path in self.folder.iterdir() if path.is_file()]
        return {path.name: path.read_bytes() for path in files}

    @posix
    def test_what_is_no_unicode_is_an_error_and_never_a_conflict(self) -> None:
        database = self.new_database()
        self.call(database, "op-a")
        for call in ("op-\udcff", "weekly"), ("op-a\udcff", "weekly"), ("x", "\udcff"):
            self.is_error(self.call(database, *call), "surrogates")
        self.assertEqual(self.rows(database), FIRST_JOB)


if __name__ == "__main__":
    unittest.main()
