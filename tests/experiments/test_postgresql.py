"""What if the jobs live in PostgreSQL?

Crash model: the client, a psql process, is killed by SIGKILL, or the server ends its
connection. The machine lives on, so the server does without fsync. What runs is the SQL
that README.md shows, on a throwaway server.

Found: the unique key does what BEGIN IMMEDIATE does in the lab. A second call with the
same key waits in its INSERT. When the first has committed, the second replays; when the
first is gone, it creates. REPEATABLE READ and SERIALIZABLE make no second job either, but
the call that had to wait gets error 40001, which is no answer. A client's death is no
rollback: the server finishes a COMMIT whose client is dead. A job id that was read before
COMMIT is no answer. Job ids have gaps, since every call draws one.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from collections import namedtuple
from pathlib import Path

from tests.support import JOB_1, ROOT, edited

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("\n## In PostgreSQL\n", 1)[1].split("\n## ", 1)[0]
(SQL,) = re.findall(r"^```sql\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
# Where a test makes a call wait, a slow machine must not end the wait.
PATIENT_SQL = edited(SQL, ("'5s'", "'1h'"))

# A shell makes the server in a folder, and stops it and removes the folder when its stdin
# is closed, which happens however this process ends.
SERVER = """
if initdb -D "$1" -U lab -A trust -E UTF8 --locale=C --no-sync >/dev/null; then
    postgres -D "$1" -k "$1" -c listen_addresses= -c fsync=off >"$1/log" 2>&1 &
    cat
    kill $!        # for a server that has hardly started, and ignores the other
    kill -QUIT $!  # for one that runs: it ends its clients and itself at once
    wait
fi
rm -rf "$1"
"""
PROGRAMS = ("initdb", "postgres", "psql")
PSQL = ["psql", "-X", "-q", "-At", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=sqlstate"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PG")}

# How a client ends: its exit status, stdout and stderr.
DONE = (0, "", "")
KILLED = (-9, "", "")  # by SIGKILL, which Windows has no name for
JOB_2 = (0, "2\n", "")
# The rows of jobs and then those of receipts, as psql prints them.
FIRST_JOB = ["1|weekly", "op-a|weekly|1"]
TWO_JOBS = ["1|weekly", "2|weekly", "op-a|weekly|1", "op-b|weekly|2"]
# A call that was rolled back has drawn id 1, and the next one draws id 2.
SECOND_ID = ["2|weekly", "op-a|weekly|2"]


def error(sqlstate: str) -> tuple:
    """Return how a client ends that gets an error."""
    return 3, "", f"ERROR:  {sqlstate}\n"


Case = namedtuple("Case", "dies key report first first_rows retry retry_rows")
CASES = (
    Case("before COMMIT", "op-a", "weekly", KILLED, [], JOB_2, SECOND_ID),
    Case("after COMMIT", "op-a", "weekly", KILLED, FIRST_JOB, JOB_1, FIRST_JOB),
    Case("after COMMIT", "op-b", "weekly", KILLED, FIRST_JOB, JOB_2, TWO_JOBS),
    Case("after COMMIT", "op-a", "daily", KILLED, FIRST_JOB, error("KP001"), FIRST_JOB),
    Case("never", "op-b", "weekly", JOB_1, FIRST_JOB, JOB_2, TWO_JOBS),
)


def search_path() -> str:
    """Return PATH and the folders beside it where the server's programs may be."""
    # Debian keeps them out of PATH, where its psql is only a slow wrapper.
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    newest_first = sorted(debian, key=lambda path: -float(path.parent.name))
    folders = [*map(str, newest_first), os.environ["PATH"]]
    if shutil.which("pg_config"):
        bindir = subprocess.check_output(["pg_config", "--bindir"], text=True)
        folders.append(bindir.strip())
    return os.pathsep.join(folders)


def unprivileged(folder: str) -> dict:
    """Give `folder` to nobody, if this is root; return how to start a process there."""
    import pwd  # POSIX only

    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def setUpModule() -> None:
    """Start one server for all tests of this file."""
    if os.name != "posix":
        raise unittest.SkipTest("the server is started and asked in POSIX's ways")
    path = search_path()
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing and os.environ.get("RETRY_LAB_NEEDS_POSTGRESQL") == "1":
        raise FileNotFoundError(f"PostgreSQL's programs were not found: {missing}")
    if missing:
        raise unittest.SkipTest(f"PostgreSQL's programs were not found: {missing}")
    # In /tmp, because the path of a Unix socket has to be short.
    folder = tempfile.mkdtemp(prefix="retry-lab-postgresql-", dir="/tmp")
    # The shell can't remove it where /tmp is not for everybody: then it leaves it empty.
    unittest.addModuleCleanup(shutil.rmtree, folder, ignore_errors=True)
    ENVIRONMENT.update(PATH=path, LC_ALL="C")
    ENVIRONMENT.update(PGHOST=folder, PGUSER="lab", PGDATABASE="postgres")
    server = subprocess.Popen(
        ["sh", "-c", SERVER, "sh", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",  # nobody may not be allowed into the present folder
        env=ENVIRONMENT,
        start_new_session=True,  # or Ctrl-C would end the shell before it cleans up
        **unprivileged(folder),
    )
    unittest.addModuleCleanup(server.communicate)  # closes its stdin, and waits
    wait_until("true")


class Client:
    """A psql process that keeps its connection and is told what to do step by step."""

    def __init__(self, settings: str = "") -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        settings = {**ENVIRONMENT, "PGOPTIONS": settings}
        self.process = subprocess.Popen(PSQL, env=settings, text=True, **pipes)

    def send(self, script: str) -> None:
        """Send `script`, and do not wait for what comes of it."""
        self.process.stdin.write(f"{script}\n")
        self.process.stdin.flush()

    def say(self, script: str) -> str:
        """Send `script`; return what it has printed when all of it is done."""
        self.send(f"{script}\n\\echo done")
        lines = iter(self.process.stdout.readline, "")
        return "".join(itertools.takewhile(lambda line: line != "done\n", lines))

    def end(self, script: str = "") -> tuple:
        """Send the last `script`; return exit status, stdout and stderr."""
        stdout, stderr = self.process.communicate(script)
        return self.process.returncode, stdout, stderr

    def kill(self) -> tuple:
        """Kill the client with SIGKILL; return exit status, stdout and stderr."""
        self.process.kill()
        return self.end()

    def backend(self) -> int:
        """Return the id of the server's process for this client."""
        return int(self.say("SELECT pg_backend_pid();"))


def wait_until(condition: str) -> None:
    """Ask the server until `condition` holds; a minute is for a test that fails."""
    deadline = time.monotonic() + 60
    seen = None
    while seen != (0, "t\n", ""):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition}: {seen}")
        seen = Client().end(f"SELECT {condition};")


COMMIT = "COMMIT;\n\\echo :job\n"


def open_call(key: str = "op-a", report: str = "weekly") -> str:
    """Return the script of a call before its COMMIT, which keeps the answer in :job."""
    return f"BEGIN;\nSELECT create_job('{key}', '{report}') AS job \\gset\n"


class ServiceTest(unittest.TestCase):
    """A test with schemas of its own, each filled by the README's SQL."""

    numbers = itertools.count()

    def setUp(self) -> None:
        self.new_service(PATIENT_SQL)

    def new_service(self, sql: str) -> None:
        """Fill a schema by `sql`, and let clients use it from now on."""
        schema = f"service_{next(self.numbers)}"
        self.settings = f"-c search_path={schema}"
        self.run_sql(f"CREATE SCHEMA {schema};")
        self.run_sql(sql)

    def client(self, script: str = "") -> Client:
        """Return a new client that has run `script`; it does not outlive the test."""
        client = Client(self.settings)
        self.addCleanup(client.process.__exit__, None, None, None)
        self.addCleanup(client.process.kill)
        client.say(script)
        return client

    def run_sql(self, sql: str) -> "list[str]":
        """Run `sql`, which must not fail; return the rows that it prints."""
        status, stdout, stderr = self.client().end(sql)
        self.assertEqual((status, stderr), (0, ""))
        return stdout.splitlines()

    def rows(self) -> "list[str]":
        """Return all rows of jobs, and then all rows of receipts."""
        jobs = "SELECT * FROM jobs ORDER BY id;"
        return self.run_sql(f"{jobs} SELECT * FROM receipts ORDER BY job_id;")

    def call(self, *request: str, dies: str = "never") -> tuple:
        """Make a call in a client that is killed where it `dies`; say how it ends."""
        client = self.client(open_call(*request))
        if dies == "before COMMIT":
            return client.kill()
        if dies == "after COMMIT":
            client.say("COMMIT;")
            return client.kill()
        return client.end(COMMIT)

    def check_replay(self) -> None:
        """Check that the first call made job 1, and that a retry replays."""
        self.assertEqual((self.call(), self.rows()), (JOB_1, FIRST_JOB))

    def check_only_job(self, answer: tuple) -> None:
        """Check that `answer` is a job id, and that there is only this job."""
        job_id = answer[1].strip()
        self.assertEqual(answer, (0, f"{job_id}\n", ""))
        self.assertEqual(self.rows(), [f"{job_id}|weekly", f"op-a|weekly|{job_id}"])

    def wait_until_held(self, holder: Client, clients: int = 1) -> None:
        """Wait until as many clients wait for a lock that `holder` has."""
        held = f"{holder.backend()} = ANY (pg_blocking_pids(pid))"
        waiting = f"SELECT count(*) FROM pg_stat_activity WHERE {held}"
        wait_until(f"({waiting}) = {clients}")

    def two_calls(self) -> "tuple[Client, Client]":
        """Return a client before its COMMIT, and one that retries and waits for it."""
        first, second = self.client(open_call()), self.client()
        second.send(open_call() + COMMIT)
        self.wait_until_held(first)
        return first, second

    def hold(self, trigger: str) -> Client:
        """Hold each client where `trigger` fires, until the client returned is killed."""
        wait = "BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END"
        function = "FUNCTION hold() RETURNS trigger LANGUAGE plpgsql"
        self.run_sql(f"CREATE {function} AS '{wait}';")
        self.run_sql(f"CREATE {trigger} EXECUTE FUNCTION hold();")
        return self.client("SELECT pg_advisory_lock(1);")


class AsInTheLab(ServiceTest):
    def test_the_five_cases(self) -> None:
        """Each of the lab's cases has the lab's rows and answers, but for gaps in ids."""
        for number, case in enumerate(CASES, 1):
            with self.subTest(case=number):
                self.new_service(SQL)
                self.assertEqual(self.call(dies=case.dies), case.first)
                self.assertEqual(self.rows(), case.first_rows)
                self.assertEqual(self.call(case.key, case.report), case.retry)
                self.assertEqual(self.rows(), case.retry_rows)

    def test_a_call_may_stand_alone(self) -> None:
        """Without BEGIN a call commits by itself, replays, and names a key in conflict."""
        for _ in range(2):
            call = "SELECT create_job('op-a', 'weekly');"
            self.assertEqual(self.client().end(call), JOB_1)
        call = "\\set VERBOSITY terse\nSELECT create_job('op-a', 'daily');"
        conflict = "ERROR:  key_payload_conflict: op-a\n"
        self.assertEqual(self.client().end(call), (3, "", conflict))
        self.assertEqual(self.rows(), FIRST_JOB)

    def test_the_schema_rejects_rows_that_make_no_sense(self) -> None:
        """No empty key, no NULL, and no two receipts for a job."""
        self.assertEqual(self.call(), JOB_1)
        for row, sqlstate in (
            ("'', 'weekly', 2", "23514"),
            ("NULL, 'weekly', 2", "23502"),
            ("'op-b', NULL, 2", "23502"),
            ("'op-b', 'weekly', NULL", "23502"),
            ("'op-b', 'weekly', 1", "23505"),
        ):
            with self.subTest(row):
                insert = f"INSERT INTO receipts VALUES ({row});"
                self.assertEqual(self.client().end(insert), error(sqlstate))


class WhileTheFirstIsOpen(ServiceTest):
    def test_a_retry_waits_and_replays(self) -> None:
        """A retry waits for the first call, and replays when that has committed."""
        first, second = self.two_calls()
        self.assertEqual(first.end(COMMIT), JOB_1)
        self.assertEqual(second.end(), JOB_1)
        self.assertEqual(self.rows(), FIRST_JOB)

    def test_a_retry_waits_and_creates(self) -> None:
        """A retry waits for the first call, and creates when that is rolled back."""
        for end, heard in (
            ("ROLLBACK;", ""),
            ("SELECT pg_terminate_backend(pg_backend_pid());", "57P01"),
            ("SET idle_in_transaction_session_timeout = '1ms';", "25P03"),
        ):
            with self.subTest(end):
                self.new_service(PATIENT_SQL)
                first, second = self.two_calls()
                first.say(end)
                self.assertEqual(second.end(), JOB_2)
                self.assertEqual(self.rows(), SECOND_ID)
                _, stdout, stderr = first.end("SELECT;")
                self.assertEqual(stdout, "")
                self.assertIn(heard, stderr)

    def test_a_retry_waits_and_creates_after_a_death(self) -> None:
        """A retry waits for the first call, and creates when its client is killed."""
        first, second = self.two_calls()
        self.assertEqual((first.kill(), second.end()), (KILLED, JOB_2))
        self.assertEqual(self.rows(), SECOND_ID)

    def at_once(self, keys: "list[str]") -> "list[tuple]":
        """Bring a client for each key to its INSERT, let all go; say how they end."""
        gate = self.hold("TRIGGER hold BEFORE INSERT ON receipts")
        clients = [self.client() for _ in keys]
        for client, key in zip(clients, keys):
            client.send(open_call(key) + COMMIT)
        self.wait_until_held(gate, len(keys))
        gate.kill()
        return [client.end() for client in clients]

    def test_eight_calls_with_one_key_make_one_job(self) -> None:
        """Eight clients at once with one key: one job, and all hear of its id."""
        answers = self.at_once(["op-a"] * 8)
        self.assertEqual(answers, [answers[0]] * 8)
        self.check_only_job(answers[0])

    def test_eight_calls_with_eight_keys_make_eight_jobs(self) -> None:
        """Eight clients at once with eight keys: eight jobs, and to each its own."""
        keys = [f"op-{number}" for number in range(8)]
        ids = [stdout.strip() for _, stdout, _ in self.at_once(keys)]
        self.assertEqual(sorted(ids), list("12345678"))
        receipts = [f"{key}|weekly|{job_id}" for key, job_id in zip(keys, ids)]
        jobs = [f"{job_id}|weekly" for job_id in ids]
        self.assertEqual(sorted(self.rows()), sorted(jobs + receipts))


class NoAnswer(ServiceTest):
    """What is no answer makes no second job, and the same key is answered later."""

    def test_a_wait_that_is_over_first_is_no_answer(self) -> None:
        """A retry whose wait is in vain writes nothing; the one after it replays."""
        for sql, setting, sqlstate in (
            (edited(SQL, ("'5s'", "'50ms'")), "", "55P03"),
            (PATIENT_SQL, "SET statement_timeout = '50ms';", "57014"),
        ):
            with self.subTest(sqlstate):
                self.new_service(sql)
                first, second = self.client(open_call()), self.client()
                self.assertEqual(second.end(setting + open_call()), error(sqlstate))
                self.assertEqual(self.rows(), [])
                self.assertEqual(first.end(COMMIT), JOB_1)
                self.check_replay()

    def test_other_isolation_levels_must_try_again(self) -> None:
        """At the stricter levels the retry gets 40001; tried again as a whole it replays."""
        for level in r"repeatable\ read", "serializable":
            with self.subTest(level):
                self.new_service(PATIENT_SQL)
                self.settings += f" -c default_transaction_isolation={level}"
                first, second = self.two_calls()
                self.assertEqual(first.end(COMMIT), JOB_1)
                self.assertEqual(second.end(), error("40001"))
                self.assertEqual(self.rows(), FIRST_JOB)
                self.check_replay()

    def test_a_deadlock_is_no_answer(self) -> None:
        """Two keys in one transaction can deadlock; both keys are answered later."""
        # The first client never looks for a deadlock, so the second is the victim.
        first = self.client("SET deadlock_timeout = '1h';" + open_call("op-a"))
        second = self.client("SET deadlock_timeout = '1ms';" + open_call("op-b"))
        first.send("SELECT create_job('op-b', 'weekly') AS job \\gset\n" + COMMIT)
        self.wait_until_held(second)
        victim = second.end("SELECT create_job('op-a', 'weekly');")
        self.assertEqual(victim, error("40P01"))
        self.assertEqual(self.call("op-b"), first.end())
        self.assertEqual(self.call("op-a"), JOB_1)

    def test_a_crash_of_the_server_is_no_answer(self) -> None:
        """When one backend crashes, the server ends all; the next call creates."""
        client, other = self.client(open_call()), self.client()
        there = f"SELECT FROM pg_stat_activity WHERE pid = {client.backend()}"
        os.kill(other.backend(), signal.SIGKILL)
        wait_until(f"NOT EXISTS ({there})")
        _, stdout, stderr = client.end(COMMIT)
        self.assertEqual(stdout, "")
        self.assertIn("57P02", stderr)
        self.check_only_job(self.call())

    def test_a_client_killed_in_commit_is_no_rollback(self) -> None:
        """A client dies while the server commits: the job is there, a retry replays."""
        each_row = "AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        for call in open_call() + COMMIT, "SELECT create_job('op-a', 'weekly');":
            with self.subTest(call):
                self.new_service(PATIENT_SQL)
                gate = self.hold(f"CONSTRAINT TRIGGER hold {each_row}")
                client = self.client()
                client.send(call)
                self.wait_until_held(gate)
                self.assertEqual((client.kill(), self.rows()), (KILLED, []))
                gate.kill()
                self.check_replay()

    def test_a_receipt_purged_in_mid_call_is_no_answer(self) -> None:
        """A receipt purged between the two statements: an error, and no job."""
        self.assertEqual(self.call(), JOB_1)
        # It fires at the end of the INSERT, also of one that makes no row.
        gate = self.hold("TRIGGER hold AFTER INSERT ON receipts")
        client = self.client()
        client.send(open_call() + COMMIT)
        self.wait_until_held(gate)
        self.run_sql("DELETE FROM receipts;")
        gate.kill()
        self.assertEqual(client.end(), error("P0002"))
        self.assertEqual(self.rows(), ["1|weekly"])

    def test_a_swallowed_error_makes_commit_roll_back(self) -> None:
        """COMMIT after a swallowed error says ROLLBACK; the job id was no answer."""
        script = "\\set QUIET off\n\\set ON_ERROR_STOP off\n" + open_call()
        seen = self.client().end(script + "SELECT 1 / 0;\n" + COMMIT)
        self.assertEqual(seen, (0, "BEGIN\nROLLBACK\n1\n", "ERROR:  22012\n"))
        self.assertEqual(self.rows(), [])
        seen = self.client().end(script + COMMIT)
        self.assertEqual(seen, (0, "BEGIN\nCOMMIT\n2\n", ""))


LOOK = "SELECT job_id FROM receipts WHERE key = 'op-a';"
INSERT_JOB = "INSERT INTO jobs (report) VALUES ('weekly');\n"
INSERT_RECEIPT = "INSERT INTO receipts VALUES ('op-a', 'weekly', {});\n"
ONE_STATEMENT = f"""
WITH receipt AS (
    INSERT INTO receipts VALUES ('op-a', 'weekly', nextval('jobs_id_seq'))
    ON CONFLICT (key) DO NOTHING RETURNING job_id
), job AS (
    INSERT INTO jobs SELECT job_id, 'weekly' FROM receipt
)
SELECT job_id FROM receipt UNION {LOOK}
"""


class BrokenVariants(ServiceTest):
    """Each does what the table in README.md says."""

    def test_insert_and_read_in_one_statement_reads_nothing(self) -> None:
        """In one statement, a call that had to wait gets no row, and no error."""
        first, second = self.client("BEGIN;" + ONE_STATEMENT), self.client()
        second.send(ONE_STATEMENT)
        self.wait_until_held(first)
        first.say("COMMIT;")
        self.assertEqual(second.end(), DONE)
        self.assertEqual(self.client().end(ONE_STATEMENT), JOB_1)
        self.assertEqual(self.rows(), FIRST_JOB)

    def test_without_on_conflict_a_retry_gets_an_error(self) -> None:
        """Without ON CONFLICT every retry gets an error, and none ever replays."""
        self.new_service(edited(SQL, ("ON CONFLICT (key) DO NOTHING ", "")))
        self.assertEqual((self.call(), self.call()), (JOB_1, error("23505")))
        self.assertEqual(self.rows(), FIRST_JOB)

    def test_look_first_and_then_insert(self) -> None:
        """Both look before either inserts: an error, or a second job if no key is unique."""
        not_unique = "ALTER TABLE receipts DROP CONSTRAINT receipts_pkey;"
        two_receipts = [*TWO_JOBS[:3], "op-a|weekly|2"]
        insert = INSERT_JOB + INSERT_RECEIPT.format("lastval()") + "COMMIT;"
        for change, end, rows in (
            ("", error("23505"), FIRST_JOB),
            (not_unique, DONE, two_receipts),
        ):
            with self.subTest(change):
                self.new_service(SQL + change)
                first, second = self.client(), self.client()
                for client in first, second:
                    self.assertEqual(client.say("BEGIN;" + LOOK), "")
                self.assertEqual((first.end(insert), second.end(insert)), (DONE, end))
                self.assertEqual(self.rows(), rows)

    def test_job_first_and_the_retry_makes_a_second_job(self) -> None:
        """The job committed, then a death: no receipt, and the retry makes another."""
        self.client(INSERT_JOB).kill()
        self.assertEqual(self.call(), JOB_2)
        self.assertEqual(self.rows(), ["1|weekly", *SECOND_ID])

    def test_receipt_first_and_there_is_no_job(self) -> None:
        """A receipt alone fails at COMMIT; without the foreign key, a retry replays it."""
        receipt = INSERT_RECEIPT.format("nextval('jobs_id_seq')")
        seen = self.client(f"BEGIN;\n{receipt}").end("\\echo inserted\nCOMMIT;")
        self.assertEqual(seen, (3, "inserted\n", "ERROR:  23503\n"))
        self.assertEqual(self.rows(), [])
        self.run_sql("ALTER TABLE receipts DROP CONSTRAINT receipts_job_id_fkey;")
        self.client(receipt).kill()
        self.assertEqual(self.call(), JOB_2)
        self.assertEqual(self.rows(), ["op-a|weekly|2"])


if __name__ == "__main__":
    unittest.main()
