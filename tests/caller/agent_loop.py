"""From a turn's calls, saved before, to saved results."""

import sqlite3
from json import dumps, loads

from runner import NOTES, Rejected, take_turn


def open_notes(path):
    """Open a conversation's notes, locked until we end."""
    notes = sqlite3.connect(path, isolation_level=None)
    notes.execute("PRAGMA locking_mode = EXCLUSIVE")
    notes.executescript(f"BEGIN EXCLUSIVE; {NOTES}; COMMIT")
    return notes


def results(notes, turn, calls, tools, reads):
    def check(request):
        name, arguments = loads(request)
        try:  # half an emoji, unless JSON escapes it, fails
            dumps(arguments, ensure_ascii=False).encode()
            return tools[name].check(**arguments)
        except Exception as error:
            raise Rejected(repr(error)) from error

    def send(key, request):
        name, arguments = loads(request)
        return tools[name].send(key, **arguments)

    told, new = {}, {}
    for call_id, name, arguments in calls:
        request = dumps([name, arguments], sort_keys=True)
        if name in reads:  # no effects: no note, no wait
            told[call_id] = reads[name](arguments)
        else:
            new[call_id] = request
    said = take_turn(notes, turn, new.values(), check, send)
    for call_id, text in zip(new, said):
        told[call_id] = text, not text.startswith("done")
    return told
