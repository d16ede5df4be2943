"""Several processes on this machine as one run: start them, and end them all when one of them ends badly."""

import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

_LAUNCHED = "PARALLEL_BERT_LAUNCHED"  # in the environment of the processes that `launch` starts


def launch(script: str, argv: Sequence[str], processes: int) -> int:
    """Run `script argv` in `processes` processes; the exit status of the run.

    The first that ends badly ends the run: the others would wait for it in their next sum.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, script, *argv, "--coordinator", address, "--process-id", str(number)],
            stdin=subprocess.PIPE,  # its end tells them when this process has gone
            env={**os.environ, _LAUNCHED: "1"},
        )
        for number in range(processes)
    ]
    ended: queue.Queue[int] = queue.Queue()
    for number, process in enumerate(started):
        threading.Thread(target=lambda n, p: (p.wait(), ended.put(n)), args=(number, process), daemon=True).start()
    try:
        for _ in started:
            number = ended.get()
            if status := started[number].returncode:
                return _report(number, status, script, argv)
        return 0
    finally:
        _end(started)


def _report(number: int, status: int, script: str, argv: Sequence[str]) -> int:
    if status == 2:
        return 2  # it has said itself what the user can put right
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    command = shlex.join(["python", script, *(word for word in argv if word != "--resume"), "--resume"])
    print(
        f"error: process {number} {how}, so the run has ended and the others were stopped; to go on from the last checkpoint:\n"
        f"  {command}",
        file=sys.stderr,
    )
    return 1


def _end(started: Sequence[subprocess.Popen]) -> None:
    for process in started:
        process.kill()  # JAX catches SIGTERM, and they would wait for each other
    for process in started:
        process.wait()
        if process.stdin:
            process.stdin.close()


def end_with_the_launcher() -> None:
    """In a process that `launch` started: end when the launcher ends, however it does."""
    if os.environ.get(_LAUNCHED):
        threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    # The descriptor itself: sys.stdin has a lock, and the interpreter aborts if a thread holds it at the end.
    while os.read(0, 1):
        pass
    os._exit(1)
