"""What do the tests share? Real worker processes, folders of their own, a look at rows."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import retry_lab

LAB = Path(retry_lab.__file__).resolve()
ROOT = LAB.parent
FIRST_JOB = ([(1, "weekly")], [("op-a", "weekly", 1)])
ERROR_LINE = r"\Aerror: [^\n]+\n\Z"
JOB_1 = (0, "1\n", "")  # exit status, stdout and stderr of the call that made it


def run(*command: object, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run Python on `command`; return its exit status and both streams as text."""
    options.setdefault("stdin", subprocess.DEVNULL)
    argv = [sys.executable, *map(str, command)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **options)


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


def readme_table(heading: str) -> "list[str]":
    """Return the rows, less the header, of the table under a heading of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def edited(source: str, *edits: "tuple[str, str]") -> str:
    """Return `source` after each (old, new); raise ValueError if one no longer applies."""
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"stands {source.count(old)} times, not once: {old!r}")
        source = source.replace(old, new)
    return source


def forked(work: "Callable[..., int]", *arguments: object) -> int:
    """Fork a process that does `work` and exits with what it returns; return its id."""
    process = os.fork()
    if process:
        return process
    try:
        os._exit(work(*arguments))
    finally:  # reached by an error only, which must not go on as a second test run
        traceback.print_exc()
        os._exit(99)


def ended(process: int) -> int:
    """Wait for `process`; return its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


# Just before a process runs the statement at `place`, it says so on stderr and waits
# for its stdin to be closed. SQLite's trace is the seam: the lab stays as it is.
HELD = """
import sqlite3, sys
place, *call = sys.argv[1:]
def hold(statement):
    if statement.startswith(place):
        print(place, file=sys.stderr, flush=True)
        sys.stdin.read()
class Held(sqlite3.Connection):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.set_trace_callback(hold)
sqlite3.connect = Held
"""
WORKER = "import retry_lab; sys.exit(retry_lab.main(['worker', *call]))"


def held_command(place: str, code: str, *call: str) -> "list[str]":
    """Return the command line of a process that runs `code` and is held at `place`."""
    return [sys.executable, "-B", "-S", "-c", HELD + code, place, *call]


class LabTest(unittest.TestCase):
    """A test with a folder of its own, gone afterwards."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="retry-lab-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()

    def new_database(self, name: str = "service.sqlite") -> str:
        """Make an empty database of the service; return its path."""
        path = str(self.folder / name)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript(retry_lab.SCHEMA)
        return path

    def call(
        self,
        database: str,
        key: str,
        report: str = "weekly",
        fault: str = "none",
        **how: Path,
    ) -> "tuple[int, str, str]":
        """Make one attempt in a worker process; return exit status, stdout and stderr."""
        command = worker_command(database, key, report, fault, **how)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def rows(self, database: str) -> "tuple[list[tuple], list[tuple]]":
        """Return all rows of jobs and of receipts, in the order they were written."""
        with contextlib.closing(sqlite3.connect(database)) as connection:
            jobs = connection.execute("SELECT id, report FROM jobs ORDER BY id")
            query = "SELECT key, report, job_id FROM receipts ORDER BY job_id"
            return jobs.fetchall(), connection.execute(query).fetchall()

    def edited_lab(
        self, *edits: "tuple[str, str]", name: str = "edited_lab.py"
    ) -> Path:
        """Write a copy of the lab with each (old, new) edit made; return its path."""
        path = self.folder / name
        source = edited(LAB.read_text(encoding="utf-8"), *edits)
        path.write_text(source, encoding="utf-8")
        return path
