"""What do the tests share? Real processes with a limit, a folder each, a look at rows."""

import contextlib
import os
import signal
import sqlite3
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import retry_lab
from tests.watch import LIMIT, held_command

LAB = Path(retry_lab.__file__).resolve()
ROOT = LAB.parent
SOURCE = LAB.read_text(encoding="utf-8")
JOB_1 = (0, "1\n", "")  # how the call that made it ends: exit status, stdout, stderr
REJECTED = (20, "key_payload_conflict\n", "")
EMPTY = ([], [])  # all rows of jobs, and all rows of receipts
FIRST_JOB = ([(1, "weekly")], [("op-a", "weekly", 1)])
ERROR_LINE = r"\Aerror: [^\n]+\n\Z"

posix = unittest.skipUnless(os.name == "posix", "it takes a signal or a shell")


def run(*command, input=None, timeout=LIMIT, **options) -> "CompletedProcess[str]":
    """Run Python on `command`; return its exit status and both streams as text."""
    process = started([sys.executable, *map(str, command)], **options)
    try:
        streams = process.communicate(input, timeout)
    finally:
        stop(process)
    return CompletedProcess(process.args, process.returncode, *streams)


def started(command: "list[str]", **options: object) -> "Popen[str]":
    """Start a process with three pipes and, on POSIX, in a group of its own."""
    pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "text": True}
    return Popen(command, **{"start_new_session": True, **options, **pipes})


def end(process: "Popen[str]") -> "tuple[int, str, str]":
    """Let `process` go on; return how it ends: exit status, stdout and stderr."""
    process.stdin.close()
    process.stdin = None  # or communicate would flush it
    streams = process.communicate(timeout=LIMIT)
    return (process.returncode, *streams)


def stop(process: "Popen[str]") -> None:
    """End `process` and what it started, if it still runs, and close its pipes."""
    if process.poll() is None:
        with contextlib.suppress(AttributeError, OSError):  # Windows has no groups
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.__exit__(None, None, None)


def environment(**variables: str) -> "dict[str, str]":
    """Return this process's environment less PYTHON*, and with `variables`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return {**kept, **variables}


def worker_command(*arguments: str, lab: Path = LAB) -> "list[str]":
    """Return the command line of one worker process, as lean as the lab starts it."""
    return [sys.executable, "-I", "-S", str(lab), "worker", *arguments]


def side_by_side(work: "Callable[..., object]", *columns: "Iterable[object]") -> list:
    """Return what `work` returns for each row of `columns`, three at a time."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, *columns))


def edited(source: str, *edits: "tuple[str, str]") -> str:
    """Return `source` after each (old, new); raise ValueError if one no longer applies."""
    for old, new in edits:
        if source.count(old) != 1:
            count = source.count(old)
            raise ValueError(f"this edit no longer applies ({count} places): {old!r}")
        source = source.replace(old, new)
    return source


def edits_of(diff: str) -> "list[tuple[str, str]]":
    """Return the (old, new) of each hunk of a diff; "@@" lines part the hunks."""
    edits = []
    for hunk in diff.strip("\n").split("\n@@\n"):
        lines = hunk.splitlines(keepends=True)
        lines[-1] += "\n"
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        edits.append((old, new))
    return edits


class LabTest(unittest.TestCase):
    """A test with a folder of its own, gone afterwards."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="retry-lab-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()

    def new_database(
        self, name="service.sqlite", schema=retry_lab.SCHEMA, pragma=""
    ) -> str:
        """Make a database with the tables of `schema`; return its path."""
        path = str(self.folder / name)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript(f"{pragma} BEGIN; {schema} COMMIT;")
        return path

    def call(
        self, database: str, key: str, report="weekly", fault="none", lab: Path = LAB
    ) -> "tuple[int, str, str]":
        """Make one attempt in a worker process; return exit status, stdout and stderr."""
        done = run(*worker_command(database, key, report, fault, lab=lab)[1:])
        return done.returncode, done.stdout, done.stderr

    def start(self, *command: object, **options: object) -> "Popen[str]":
        """Start a process in the project; it ends with the test."""
        settings = {"cwd": ROOT, "env": environment(), **options}
        process = started(list(map(str, command)), **settings)
        self.addCleanup(stop, process)
        return process

    def held(self, place: str, *command: object) -> "Popen[str]":
        """Start a script; return its process when it has come to `place`, and waits."""
        process = self.start(*held_command(place, *command))
        came_to = process.stderr.readline()
        self.assertEqual(came_to, f"{place}\n", f"waited for {command} to come there")
        return process

    def rows(self, database: str) -> "tuple[list[tuple], list[tuple]]":
        """Return all rows of jobs and of receipts, in the order they were written."""
        with contextlib.closing(sqlite3.connect(database)) as connection:
            jobs = connection.execute("SELECT * FROM jobs ORDER BY id")
            receipts = connection.execute("SELECT * FROM receipts ORDER BY job_id")
            return jobs.fetchall(), receipts.fetchall()

    def edited_lab(
        self, *edits: "tuple[str, str]", name: str = "edited_lab.py"
    ) -> Path:
        """Write a copy of the lab with each (old, new) edit made; return its path."""
        path = self.folder / name
        path.write_text(edited(SOURCE, *edits), encoding="utf-8")
        return path
