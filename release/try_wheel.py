"""Tries an installed wheel without a compiler: the demo, the end of a worker, and the server.

`make dist-try` runs it with the Python of a clean environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = EXAMPLES / "demo_model"


def main() -> None:
    """Try the wheel; an assertion fails if anything differs from the promise."""
    os.environ["PATH"] = str(Path(sys.executable).parent)  # no compiler, and no other program of the machine
    assert not any(map(shutil.which, ("cc", "gcc", "clang")))
    import parallelformers_ng
    from parallelformers_ng.collectives.shared_memory import is_built

    assert Path(sys.prefix) in Path(parallelformers_ng.__file__).parents, "the clone is imported, not the wheel"
    assert is_built(), "the wheel has no kernels"
    subprocess.run([sys.executable, "-P", EXAMPLES / "demo.py"], check=True, timeout=600)
    restart()
    serve()
    print(f"the wheel works with Python {sys.version.split()[0]}: demo equal, a worker replaced, the server answers")


def restart() -> None:
    """Kill a worker, and compare the tokens of its successor."""
    import torch
    from transformers import AutoModelForCausalLM

    from parallelformers_ng import GroupError, parallelize
    from parallelformers_ng.model.parallelized import deployment_of

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**prompt)
    parallelize(model, num_gpus=2, workers={"device": "cpu"})
    os.kill(deployment_of(model).pids[1], signal.SIGKILL)
    for _ in range(20):
        try:
            assert torch.equal(model.generate(**prompt), expected)
            break
        except GroupError as error:  # until the new workers are ready
            print(error)
            time.sleep(0.5)
    else:
        raise AssertionError("the workers did not restart")
    model.deparallelize()


def serve() -> None:
    """Start the server, and ask it for /health."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).parent / "parallelformers-ng",
        "serve",
        MODEL,
        "--num-gpus",
        "2",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert server.poll() is None, "the server has ended"
                time.sleep(0.5)
        else:
            raise AssertionError("the server does not answer")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


if __name__ == "__main__":
    main()
