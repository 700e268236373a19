"""What if the jobs live in PostgreSQL?

Crash model: the client, a psql process, is killed by SIGKILL; the server ends its
connection; or the server crashes, and starts again from its log. The machine lives on,
so there is no fsync. What runs is the SQL that README.md shows, on the server whose
folder of programs RETRY_LAB_POSTGRESQL names, or else on the newest that is found.

Found: the unique key does what BEGIN IMMEDIATE does in the lab. A second call with the
same key waits in its INSERT. When the first has committed, the second replays; when the
first is gone, it creates. At the stricter isolation levels it gets error 40001, which
is no answer. A client's death is no rollback: the server finishes a COMMIT whose client
is dead. With synchronous_commit off, a crash can lose a job that was answered.
"""

import importlib.util
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from tests.support import JOB_1, ROOT, edited

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("\n## In PostgreSQL\n", 1)[1].split("\n## ", 1)[0]
BLOCKS = re.findall(r"^```sql\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
(SQL,) = [block for block in BLOCKS if "CREATE FUNCTION" in block]
(GRANTS,) = [block for block in BLOCKS if "GRANT" in block]
# Where a test makes a call wait, a slow machine must not end the wait.
PATIENT = ("'5s'", "'1h'")
LIMIT = 10  # seconds for one wait, of this process or of a statement in the server
# A shell makes the server in a folder, and stops it and removes the folder when its
# stdin is closed, which happens however this process ends. Autovacuum and the writer of
# dirty pages would write the log, and a crash would lose nothing then.
SERVER = f"""
if initdb -D "$1" -U lab -A trust -E UTF8 --locale=C --no-sync >/dev/null; then
    postgres -D "$1" -k "$1" -c listen_addresses= -c statement_timeout={LIMIT}s \\
        -c fsync=off -c autovacuum=off -c bgwriter_lru_maxpages=0 >"$1/log" 2>&1 &
    cat
    kill $!        # for a server that has hardly started, and ignores the other
    kill -QUIT $!  # for one that runs: it ends its clients and itself at once
    wait
fi
rm -rf "$1"
"""
PSQL = ["psql", "-X", "-q", "-At", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=sqlstate"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PG")}


def error(sqlstate: str) -> tuple:
    """Return how a client ends that gets an error."""
    return 3, "", f"ERROR:  {sqlstate}\n"


def setUpModule() -> None:
    """Start one server for all tests of this file."""
    if os.name != "posix":
        raise unittest.SkipTest("the server is started and asked in POSIX's ways")
    # Debian keeps the programs out of PATH, where its psql is only a slow wrapper.
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    newest_first = sorted(debian, key=lambda path: -float(path.parent.name))
    path = os.pathsep.join([*map(str, newest_first), os.environ["PATH"]])
    chosen = os.environ.get("RETRY_LAB_POSTGRESQL") or path
    places = {"initdb": chosen, "postgres": chosen, "psql": path}
    missing = [name for name in places if not shutil.which(name, path=places[name])]
    if missing:
        needed = os.environ.get("RETRY_LAB_NEEDS_POSTGRESQL") == "1"
        outcome = FileNotFoundError if needed else unittest.SkipTest
        raise outcome(f"PostgreSQL's programs were not found: {missing}")
    # In /tmp, because the path of a Unix socket has to be short.
    folder = tempfile.mkdtemp(prefix="retry-lab-postgresql-", dir="/tmp")
    # The shell can't remove it where /tmp is not for everybody, but can empty it.
    unittest.addModuleCleanup(shutil.rmtree, folder, ignore_errors=True)
    ENVIRONMENT.update(PATH=os.pathsep.join([chosen, path]), LC_ALL="C")
    ENVIRONMENT.update(PGHOST=folder, PGUSER="lab", PGDATABASE="postgres")
    identity = {}
    if os.geteuid() == 0:  # as whom the server does not run
        shutil.chown(folder, "nobody")
        identity = {"user": "nobody", "extra_groups": []}
    server = subprocess.Popen(
        ["sh", "-c", SERVER, "sh", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",  # nobody may not be allowed into the present folder
        env=ENVIRONMENT,
        start_new_session=True,  # or Ctrl-C would end the shell before it cleans up
        **identity,
    )
    unittest.addModuleCleanup(stop, server)
    wait_until("true", seconds=60)  # making a server takes longer than a statement


def stop(server: subprocess.Popen) -> None:
    """Have the shell stop the server; kill both if that takes too long."""
    try:
        server.communicate(timeout=LIMIT)  # closes its stdin
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        raise


class Client:
    """A psql process that keeps its connection and is told what to do step by step."""

    def __init__(self, settings: str = "") -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        settings = {**ENVIRONMENT, "PGOPTIONS": settings}
        self.process = subprocess.Popen(PSQL, env=settings, text=True, **pipes)
        self.script = ""

    def send(self, script: str) -> None:
        """Send `script`, and do not wait for what comes of it."""
        self.script = script
        self.process.stdin.write(f"{script}\n")
        self.process.stdin.flush()

    def say(self, script: str) -> str:
        """Send `script`; return what psql prints until all is done, or it is gone."""
        self.send(f"{script}\n\\echo done")
        stdout = self.process.stdout.fileno()
        printed = ""
        while not printed.endswith("done\n"):
            if not select.select([stdout], [], [], LIMIT)[0]:
                raise TimeoutError(f"psql is not done after {LIMIT} s: {script}")
            news = os.read(stdout, 4096).decode()
            if not news:
                break
            printed += news
        return printed.removesuffix("done\n")

    def end(self, script: str = "") -> tuple:
        """Send the last `script`; return exit status, stdout and stderr."""
        self.script += script
        try:
            stdout, stderr = self.process.communicate(script, timeout=LIMIT)
        except subprocess.TimeoutExpired as over:
            self.process.kill()
            message = f"psql has not ended after {LIMIT} s: {self.script}"
            raise TimeoutError(message) from over
        return self.process.returncode, stdout, stderr


def wait_until(condition: str, seconds: int = LIMIT) -> None:
    """Ask the server until `condition` holds, and for so many seconds at most."""
    deadline = time.monotonic() + seconds
    seen = None
    while seen != (0, "t\n", ""):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {seconds} s: {condition}: {seen}")
        seen = Client().end(f"SELECT {condition};")


def wait_until_held(holder: Client) -> None:
    """Wait until a client waits for a lock that `holder` has."""
    pid = holder.say("SELECT pg_backend_pid();").strip()
    held = f"SELECT FROM pg_stat_activity WHERE {pid} = ANY (pg_blocking_pids(pid))"
    wait_until(f"EXISTS ({held})")


# How a client ends: its exit status, stdout and stderr.
KILLED = (-9, "", "")  # by SIGKILL, which Windows has no name for
JOB_2 = (0, "2\n", "")
# The rows of jobs and then those of receipts, as psql prints them.
FIRST_JOB = ["1|weekly", "op-a|weekly|1"]
TWO_JOBS = ["1|weekly", "2|weekly", "op-a|weekly|1", "op-b|weekly|2"]
# How a call ends, and the rows then.
FIRST = (JOB_1, FIRST_JOB)
SECOND = (JOB_2, ["2|weekly", "op-a|weekly|2"])  # id 1 was drawn, and rolled back
DIED = (KILLED, FIRST_JOB)
NO_REPLAY = (error("23505"), FIRST_JOB)
COMMIT = "COMMIT;\n\\echo :job\n"
KILL = "\\! kill -KILL $PPID\n"  # the parent of the shell is psql
CALL = "SELECT create_job('op-a', 'weekly');\n"
CONFLICT = "SELECT create_job('op-a', 'daily');\n"


def open_call(key: str = "op-a", report: str = "weekly") -> str:
    """Return the script of a call before its COMMIT, which keeps the answer in :job."""
    return f"BEGIN;\nSELECT create_job('{key}', '{report}') AS job \\gset\n"


# How the first client ends; the retry; what comes of each.
AFTER_COMMIT = f"COMMIT;\n{KILL}"
CASES = (
    (KILL, "op-a", "weekly", (KILLED, []), SECOND),
    (AFTER_COMMIT, "op-a", "weekly", DIED, FIRST),
    (AFTER_COMMIT, "op-b", "weekly", DIED, (JOB_2, TWO_JOBS)),
    (AFTER_COMMIT, "op-a", "daily", DIED, (error("KP001"), FIRST_JOB)),
    (COMMIT, "op-b", "weekly", FIRST, (JOB_2, TWO_JOBS)),
)
# What a client runs when op-a has made job 1, and the error that it gets.
ERRORS = (
    ("INSERT INTO receipts VALUES ('', 'weekly', 2);", "23514"),
    ("INSERT INTO receipts VALUES ('op-b', 'weekly', NULL);", "23502"),
    ("INSERT INTO receipts VALUES ('op-b', 'weekly', 1);", "23505"),
    ("INSERT INTO jobs (report) VALUES (NULL);", "23502"),
    ("DELETE FROM jobs;", "23503"),
    ("SELECT create_job('op-a', 'week');", "KP001"),
    ("SELECT create_job('op-a', 'weekly ');", "KP001"),
    ("SELECT create_job('op-a', 'Weekly');", "KP001"),
    ("SELECT create_job('op-a', NULL);", "23502"),
    ("SELECT create_job(NULL, 'weekly');", "23502"),
    ("SET default_transaction_read_only = on;" + CALL, "25006"),
    ("CREATE TABLE t (key text PRIMARY KEY, d date) PARTITION BY RANGE (d);", "0A000"),
)
# What a client runs; the words it gets on stdout, then on stderr; the rows afterwards.
UNDONE = f"BEGIN;SAVEPOINT s;{CALL}ROLLBACK TO s;COMMIT;"
BEHIND_SAVEPOINT = f"BEGIN;{CALL}SAVEPOINT s;{CONFLICT}ROLLBACK TO s;COMMIT;"
SETTING = f"SET lock_timeout = '7s';{CALL}{CONFLICT}SHOW lock_timeout;"
SCRIPTS = (
    (f"{CALL}SELECT create_job('op-b', 'weekly');{CALL}", "1 2 1", TWO_JOBS),
    (f"BEGIN;{CALL}{CALL}COMMIT;", "BEGIN 1 1 COMMIT", FIRST_JOB),
    (UNDONE, "BEGIN SAVEPOINT 1 ROLLBACK COMMIT", []),
    (f"BEGIN;{CALL}{CONFLICT}COMMIT;", "BEGIN 1 ROLLBACK ERROR: KP001", []),
    (BEHIND_SAVEPOINT, "BEGIN 1 SAVEPOINT ROLLBACK COMMIT ERROR: KP001", FIRST_JOB),
    (SETTING, "SET 1 7s ERROR: KP001", FIRST_JOB),
)
ONE_STATEMENT = """WITH made AS (INSERT INTO receipts VALUES ('op-a', 'weekly', 1)
    ON CONFLICT (key) DO NOTHING RETURNING job_id)
TABLE made UNION SELECT job_id FROM receipts WHERE key = 'op-a';
"""
REPEATABLE = "SET default_transaction_isolation = 'repeatable read';" + CALL
SERIALIZABLE = "SET default_transaction_isolation = 'serializable';" + CALL
IMPATIENT = "SET statement_timeout = '50ms';" + CALL
TERMINATE = "SELECT pg_terminate_backend(pg_backend_pid());"
IDLE = "SET idle_in_transaction_session_timeout = '1ms';"
ON_CONFLICT = "ON CONFLICT (key) DO NOTHING"
DO_UPDATE = "ON CONFLICT (key) DO UPDATE SET report = request"
# A change of the README's SQL; what a retry runs while the first call is open; how that
# ends, and what it hears; how the retry ends; what comes of a third call.
WAITS = (
    (PATIENT, CALL, "COMMIT;", "", JOB_1, FIRST),
    (PATIENT, CALL, "ROLLBACK;", "", JOB_2, SECOND),
    (PATIENT, CALL, KILL, "", JOB_2, SECOND),
    (PATIENT, CALL, TERMINATE, "57P01", JOB_2, SECOND),
    (PATIENT, CALL, IDLE, "25P03", JOB_2, SECOND),
    (PATIENT, REPEATABLE, "COMMIT;", "", error("40001"), FIRST),
    (PATIENT, SERIALIZABLE, "COMMIT;", "", error("40001"), FIRST),
    (PATIENT, IMPATIENT, "", "", error("57014"), FIRST),
    (("'5s'", "'50ms'"), CALL, "", "", error("55P03"), FIRST),
    (PATIENT, ONE_STATEMENT, "COMMIT;", "", (0, "", ""), FIRST),
    ((ON_CONFLICT, ""), CALL, "COMMIT;", "", error("23505"), NO_REPLAY),
    ((ON_CONFLICT, DO_UPDATE), CALL, "COMMIT;", "", error("23505"), NO_REPLAY),
)
# Tables that are there already: the README's first statement is left out.
OWN_JOBS = (
    "made date, report text, id bigserial PRIMARY KEY",
    "report text, id int GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME s) PRIMARY KEY",
    "report text, id uuid DEFAULT gen_random_uuid() PRIMARY KEY",
)


class ServiceTest(unittest.TestCase):
    """A test with schemas of its own, each filled by the README's SQL."""

    numbers = itertools.count(1)

    def setUp(self) -> None:
        self.new_service(edited(SQL, PATIENT))

    def new_service(self, sql: str) -> None:
        """Fill a schema by `sql`, and let clients use it from now on."""
        self.number = next(self.numbers)
        self.schema = f"service_{self.number}"
        self.settings = f"-c search_path={self.schema}"
        self.run_sql(f"CREATE SCHEMA {self.schema};")
        self.run_sql(edited(sql, ("public", self.schema)))

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
        receipts = "SELECT key, report, job_id FROM receipts ORDER BY job_id;"
        return self.run_sql(f"SELECT id, report FROM jobs ORDER BY id; {receipts}")

    def call(self, *request: str, end: str = COMMIT) -> tuple:
        """Make a call in a client of its own, with such an `end`; say how it ends."""
        return self.client().end(open_call(*request) + end)

    def held_call(self, trigger: str) -> "tuple[Client, Client]":
        """Return a client whose end lets another go on, held where `trigger` fires."""
        lock = f"lock_shared({self.number})"
        wait = f"BEGIN PERFORM pg_advisory_xact_{lock}; RETURN NULL; END"
        function = "FUNCTION hold() RETURNS trigger LANGUAGE plpgsql"
        self.run_sql(f"CREATE {function} AS '{wait}';")
        self.run_sql(f"CREATE {trigger} EXECUTE FUNCTION hold();")
        gate = self.client(f"SELECT pg_advisory_lock({self.number});")
        held = self.client()
        held.send(open_call() + COMMIT)
        wait_until_held(gate)
        return gate, held

    def test_the_five_cases(self) -> None:
        for end, key, report, first, retry in CASES:
            with self.subTest(end=end, key=key, report=report):
                self.new_service(SQL)
                self.assertEqual((self.call(end=end), self.rows()), first)
                self.assertEqual((self.call(key, report), self.rows()), retry)

    def test_a_row_or_a_call_that_makes_no_sense_is_an_error(self) -> None:
        self.assertEqual(self.call(), JOB_1)
        for script, sqlstate in ERRORS:
            with self.subTest(script):
                self.assertEqual(self.client().end(script), error(sqlstate))
        self.assertEqual(self.rows(), FIRST_JOB)

    def test_a_call_is_part_of_the_transaction_around_it(self) -> None:
        for script, heard, rows in SCRIPTS:
            with self.subTest(script):
                self.new_service(SQL)
                client = self.client("\\set QUIET off\n\\set ON_ERROR_STOP off")
                _, stdout, stderr = client.end(script)
                self.assertEqual((stdout + stderr).split(), heard.split())
                self.assertEqual(self.rows(), rows)

    def test_a_retry_waits_for_the_end_of_the_first(self) -> None:
        for change, script, end, heard, answer, third in WAITS:
            with self.subTest(change=change, script=script, end=end):
                self.new_service(edited(SQL, change))
                first, retry = self.client(open_call()), self.client()
                retry.send(script)
                if end:
                    wait_until_held(first)
                    first.say(end)
                self.assertEqual(retry.end(), answer)
                self.assertIn(heard, first.end("COMMIT;")[2])
                self.assertEqual((self.call(), self.rows()), third)

    def test_a_crash_can_lose_a_job_whose_commit_did_not_wait_for_the_log(self) -> None:
        writer = "FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        (pid,) = self.run_sql(f"SELECT pid {writer};")
        os.kill(int(pid), signal.SIGSTOP)
        answered = self.client("SET synchronous_commit = off;").end(CALL)
        os.kill(int(pid), signal.SIGKILL)  # which the server takes for a crash
        wait_until(f"EXISTS (SELECT {writer} AND pid <> {pid})")
        self.assertEqual((answered, self.rows()), (JOB_1, []))
        self.assertEqual(self.call("op-b"), JOB_1)  # the id that op-a was told
        self.assertEqual((self.call(), self.call()), (JOB_2, JOB_2))

    def test_a_client_killed_in_commit_is_no_rollback(self) -> None:
        each_row = "AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        gate, client = self.held_call(f"CONSTRAINT TRIGGER hold {each_row}")
        client.process.kill()
        self.assertEqual((client.end(), self.rows()), (KILLED, []))
        gate.end()
        self.assertEqual((self.call(), self.rows()), FIRST)

    def test_a_purge_in_mid_call_is_an_error(self) -> None:
        self.assertEqual(self.call(), JOB_1)
        # It fires at the end of the INSERT, also of one that makes no row.
        gate, client = self.held_call("TRIGGER hold AFTER INSERT ON receipts")
        self.run_sql("BEGIN; DELETE FROM jobs; DELETE FROM receipts; COMMIT;")
        gate.end()
        self.assertEqual((client.end(), self.rows()), (error("P0002"), []))
        self.assertEqual(self.call(), (0, "3\n", ""))

    def test_the_session_s_tables_are_not_the_service_s(self) -> None:
        temporary = "CREATE TEMPORARY TABLE receipts (LIKE receipts INCLUDING ALL);"
        client = self.client(f"{temporary} SET search_path = pg_temp;")
        call = CALL.replace("create_job", f"{self.schema}.create_job")
        self.assertEqual(client.end(call), JOB_1)
        self.assertEqual((self.call(), self.rows()), FIRST)

    def test_a_role_needs_all_of_the_grants(self) -> None:
        self.settings = ""  # the schema is public, as in the README
        self.run_sql(SQL + "CREATE ROLE app;")
        for grant in GRANTS.splitlines():
            self.assertEqual(self.client("SET ROLE app;").end(CALL), error("42501"))
            self.run_sql(grant)
        self.assertEqual(self.client("SET ROLE app;").end(CALL), JOB_1)
        self.assertEqual((self.call(), self.rows()), FIRST)

    def test_a_table_of_ones_own(self) -> None:
        receipts_and_function = SQL[SQL.index("CREATE TABLE receipts") :]
        drawn = "nextval(pg_get_serial_sequence('jobs', 'id'))"
        for columns in OWN_JOBS:
            with self.subTest(columns):
                sql = f"CREATE TABLE jobs ({columns});\n{receipts_and_function}"
                if "uuid" in columns:
                    sql = edited(sql, (drawn, "gen_random_uuid()"))
                    sql = sql.replace("bigint", "uuid")
                self.new_service(sql)
                self.run_sql("ALTER TABLE receipts ADD made timestamptz DEFAULT now();")
                job = self.call("op-a", "daily")[1].strip()
                self.assertEqual(self.call("op-a", "daily"), (0, f"{job}\n", ""))
                self.assertEqual(self.rows(), [f"{job}|daily", f"op-a|daily|{job}"])

    def test_a_driver(self) -> None:
        """psycopg has no class for KP001, so it raises the general DatabaseError."""
        needed = os.environ.get("RETRY_LAB_NEEDS_PSYCOPG") == "1"
        if not needed and not importlib.util.find_spec("psycopg"):
            self.skipTest("psycopg, the driver, is not installed")
        import psycopg

        where = f"host={ENVIRONMENT['PGHOST']} user=lab dbname=postgres"
        self.settings = "-c search_path=loaded"
        db = psycopg.connect(where, connect_timeout=LIMIT, options=self.settings)
        self.addCleanup(db.close)
        db.execute("CREATE SCHEMA loaded;" + edited(SQL, ("public", "loaded")))
        call = "SELECT create_job(%s, %s)"
        self.assertEqual(db.execute(call, ("op-a", "weekly")).fetchone(), (1,))
        with self.assertRaises(psycopg.DatabaseError) as raised, db.transaction():
            db.execute(call, ("op-a", "daily"))
        self.assertIs(type(raised.exception), psycopg.DatabaseError)
        self.assertEqual(raised.exception.sqlstate, "KP001")
        self.assertIn("key_payload_conflict: op-a", str(raised.exception))
        db.commit()
        self.assertEqual((self.call(), self.rows()), FIRST)


if __name__ == "__main__":
    unittest.main()
