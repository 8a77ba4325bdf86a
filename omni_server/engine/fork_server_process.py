"""Prepares the fork server; imported for that, first of all, in its process only.

A Ctrl-C in a terminal and a service manager's SIGTERM reach every process. The fork server ends when nobody is left who
may ask it for engines. It makes no garbage, and collections would look through all that it imports; engines turn them on
again.
"""

import gc
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
gc.disable()
