"""Prepares the fork server. Imported first in its process, and in no other.

Ctrl-C in a terminal and a service manager's SIGTERM reach every process of a service. The fork server ignores
both, and ends when no process is left that could ask it for engines. Garbage collection is off during its
imports, which then take a quarter less time; engines turn it on again.
"""

import gc
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gc.disable()
