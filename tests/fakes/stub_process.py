"""A process with the habits of an engine, run as a script by tests of launchers.

    --listen PORT        listen on 127.0.0.1 (may be given more than once)
    --bind PORT          bind without listening
    --child HABIT ...    start a child of each habit (see HABITS) and go on
    --depth N            each child starts a plain child of its own, N deep
    --ignore-term        do not end at SIGTERM
    --log LINE           print a line (may be given more than once)
    --dump FILE          write argv and environment as JSON
    --exit CODE          end at once
    --pid-folder FOLDER  when all of the above is done, write FOLDER/<label>.pid; children do the same

Without --exit it sleeps until it is ended.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HABITS = (
    "plain",
    "ignore-term",
    "own-session",  # opens a session of its own
    "clear-env",  # starts with an empty environment
    "overwrite-env",  # overwrites its environment in memory, as setproctitle does
    "hide",  # own session and empty environment: only its parent tells where it belongs
)


def overwrite_environment() -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, ord(" "), end - start)


def start_child(habit: str, args: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--label", f"{args.label}.{habit}", "--habit", habit]
    if args.pid_folder:
        command += ["--pid-folder", args.pid_folder]
    if args.depth:
        command += ["--depth", str(args.depth - 1), "--child", "plain"]
    subprocess.Popen(
        command,
        env={} if habit in ("clear-env", "hide") else None,
        start_new_session=habit in ("own-session", "hide"),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--label", default="leader")
    parser.add_argument("--habit", choices=HABITS, default="plain")
    parser.add_argument("--listen", type=int, action="append", default=[])
    parser.add_argument("--bind", type=int, action="append", default=[])
    parser.add_argument("--child", choices=HABITS, action="append", default=[])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--log", action="append", default=[])
    parser.add_argument("--dump")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--pid-folder")
    parser.add_argument("rest", nargs="*")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.ignore_term or args.habit == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.dump:
        Path(args.dump).write_text(json.dumps({"argv": sys.argv, "env": dict(os.environ)}))
    if args.habit == "overwrite-env":
        overwrite_environment()
    sockets = []
    for port in (*args.bind, *args.listen):
        held = socket.socket()
        if port in args.listen:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        if port in args.listen:
            held.listen()
        sockets.append(held)
    for habit in args.child:
        start_child(habit, args)
    for line in args.log:
        print(line, flush=True)
    if args.pid_folder:
        draft = Path(args.pid_folder, f".{args.label}.draft")
        draft.write_text(str(os.getpid()))
        draft.rename(Path(args.pid_folder, f"{args.label}.pid"))
    if args.exit is not None:
        sys.exit(args.exit)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
