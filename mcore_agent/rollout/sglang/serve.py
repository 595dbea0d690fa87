"""What the server process runs: ``serve.py ARGUMENTS.json``, the fields of SGLang's ServerArgs. Its children import this file too.

The port is bound here, before anything slow, and stays bound: SGLang listens on it beside this socket, which Linux allows as long as
this one does not listen. So nobody else can have it, and it is known; ``port`` in the folder of the arguments tells it.
"""

import json
import os
import socket
import sys


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds a port, a free one for 0. Raises OSError when it is in use."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    return held


def main(path: str) -> None:
    with open(path) as f:
        arguments = json.load(f)
    held = reserve(arguments["host"], arguments["port"])
    arguments["port"] = held.getsockname()[1]
    told = os.path.join(os.path.dirname(path), "port")
    with open(told + ".part", "w") as f:
        f.write(str(arguments["port"]))
    os.replace(told + ".part", told)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1])
