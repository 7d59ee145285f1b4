"""Takes torch elastic's place in a launch: `zygote_launcher.py SOCKET RANKS RUN_DIR`; see `zygote.py`."""

import contextlib
import json
import os
import signal
import socket
import sys

connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
request = {"environment": dict(os.environ), "ranks": int(sys.argv[2]), "run_dir": sys.argv[3]}
connection.sendall(json.dumps(request).encode() + b"\n")


def end(*_: object) -> None:
    """Pass a SIGTERM on to the ranks."""
    with contextlib.suppress(OSError):
        connection.send(b"T")


signal.signal(signal.SIGTERM, end)
code = 1
for line in connection.makefile():
    if line.startswith("exit "):
        code = int(line.split()[1])
    else:
        print(line, end="", flush=True)
sys.exit(code)
