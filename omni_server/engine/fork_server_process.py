"""Prepares the fork server; imported for that, first of all, in its process only.

Ctrl-C in a terminal and a service manager's SIGTERM reach every process of a service. The fork server ignores
both: it ends when no process is left that may ask it for engines. Garbage collection is off while it imports,
which takes a quarter less time; engines turn it on again.
"""

import gc
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gc.disable()
