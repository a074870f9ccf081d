"""Tests that threads may draw from one generator while the garbage collector runs."""

import subprocess
import sys

_PROGRAM = """
import faulthandler, gc, threading, time
from parallelformers_ng.model.caller_state import RandomStream

class Garbage:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0.0005)  # gives another thread a turn

def draw(stream):
    for _ in range(200):
        Garbage()
        stream.draw_seed()
        with stream.of_call(None) as (state, store):
            store(state)

faulthandler.dump_traceback_later(60, exit=True)
gc.set_threshold(1)
threads = [threading.Thread(target=draw, args=(RandomStream(None),)) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_collection_between_threads_does_not_hang():
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=120)
