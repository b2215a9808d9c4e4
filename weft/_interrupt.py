"""Imported first: Ctrl-C before torch and weft are imported ends the command `weft` without a traceback."""

import signal
import sys
import threading

IS_COMMAND = sys.argv[:1] == ["-m"] or sys.argv[:1] != [""] and sys.argv[0].replace("\\", "/").endswith("bin/weft")

if IS_COMMAND and threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def listen() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
