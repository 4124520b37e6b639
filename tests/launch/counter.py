"""A worker like any other, for the tests of groups."""

import os
import time


class Counter:
    def __init__(self, start):
        self.value = int(start)

    def add(self, number):
        self.value += number
        return self.value

    def pid(self):
        return os.getpid()

    def fail_on(self, pid):
        if os.getpid() == pid:
            raise KeyError("no such thing")
        return "well"

    def sleep_on(self, pid, seconds):
        time.sleep(seconds * (os.getpid() == pid))
        return "awake"

    def die(self):
        os._exit(1)
