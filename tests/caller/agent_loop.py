"""From calls, saved as `turn`, to results, saved after."""

import sqlite3
from json import dumps, loads

from runner import NOTES, UNKNOWN, read, take_turn


def open_notes(path):
    notes = sqlite3.connect(path, isolation_level=None)
    notes.executescript(NOTES)  # locked until we end
    return notes


def unknown(notes):  # for a person, who decides
    return [dict(note) for note in read(notes, UNKNOWN)]


def results(notes, turn, calls, tools, reads):
    def check(request):
        name, arguments = loads(request)
        # Half an emoji can't be sent; JSON would escape it.
        dumps(arguments, ensure_ascii=False).encode()
        return tools[name].check(**arguments)  # retention

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
