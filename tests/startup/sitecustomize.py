"""Python loads this in every process of the tests: a third of the time in which PyTorch loads and ends.

Loading it makes two million objects, which are no garbage yet, and which the end of a process frees anyway.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
