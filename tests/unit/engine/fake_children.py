"""What children of a test do, in processes of their own."""

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection


def sleep_with_a_worker(ready: Connection) -> None:
    """Starts a process of its own, as an engine core of several ranks does; tells its id."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ready.send(worker.pid)
    time.sleep(600)


def hold_a_semaphore(ready: Connection) -> None:
    """Tells the semaphore's name."""
    lock = multiprocessing.get_context("spawn").Lock()
    ready.send(vars(lock)["_semlock"].name)
    time.sleep(600)


def make_more_when_told(ready: Connection, orders: Connection) -> None:
    """After an order: a semaphore and a worker; tells the semaphore's name and the worker's id."""
    ready.send(None)
    orders.recv()
    lock = multiprocessing.get_context("spawn").Lock()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    orders.send((vars(lock)["_semlock"].name, worker.pid))
    time.sleep(600)


def end(ready: Connection, exit_code: int) -> None:
    ready.send(None)
    os._exit(exit_code)
