"""A Flask server with one route: `GET /generate_text/<text>` answers `{"inputs": …, "outputs": …}`.

    python examples/flask_app.py --model examples/demo_model --num-gpus 2
    curl http://127.0.0.1:5000/generate_text/And%20it%20came%20to%20pass

For more than trying it out, let gunicorn serve it, with one worker and many threads:

    MODEL=examples/demo_model gunicorn --pythonpath examples --workers 1 --threads 16 'flask_app:create_app()'

Each further gunicorn worker would load a model of its own. Leave `--preload` off: it calls `create_app` before gunicorn
forks, and a model can be used only from the process that parallelized it. With it, gunicorn says so and ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from flask import Flask, abort
from transformers import AutoModelForCausalLM, AutoTokenizer
from werkzeug.serving import make_server

from parallelformers_ng import parallelize
from parallelformers_ng.errors import GroupError

DEMO_MODEL = str(Path(__file__).resolve().parent / "demo_model")


def create_app(model_name: str | None = None, num_gpus: int | None = None) -> Flask:
    """Load and parallelize the model, and build the application.

    Args:
        model_name: a folder or an id of the Hugging Face hub; by default $MODEL, else the demo's model.
        num_gpus: number of workers; by default $NUM_GPUS, else all GPUs, or 2 CPU workers if there is none.
    """
    model_name = model_name or os.environ.get("MODEL", DEMO_MODEL)
    num_gpus = num_gpus or int(os.environ.get("NUM_GPUS", 0)) or None
    max_new_tokens = int(os.environ.get("MAX_NEW_TOKENS", 60))
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name)
    parallelize(model, num_gpus=num_gpus)
    os.register_at_fork(after_in_child=refuse_to_serve)

    app = Flask(__name__)
    app.url_map.merge_slashes = False  # the text may hold them

    @app.get("/generate_text/<path:text>")
    def generate_text(text: str) -> dict[str, str]:
        """Answer in the thread of the request. Calls that come at the same time are decoded together."""
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        if inputs["input_ids"].numel() == 0:
            abort(400, "the text has no tokens")
        outputs: torch.Tensor = model.generate(**inputs, max_new_tokens=max_new_tokens)
        return {"inputs": text, "outputs": tokenizer.decode(outputs[0], skip_special_tokens=True)}

    @app.get("/health")
    def health() -> dict[str, Any]:
        """Asks every worker, after the requests that are before this one."""
        return {"memory_allocated": model.memory_allocated()}

    @app.errorhandler(GroupError)
    def unavailable(error: GroupError) -> tuple[dict[str, str], int]:
        """A worker died or a request took too long. The next request finds new workers where the weights are kept."""
        app.logger.error("%s", error)
        return {"error": type(error).__name__}, 503

    return app


def refuse_to_serve() -> None:
    """In a process that was forked after the model was parallelized: it could only answer 503, so it does not start."""
    message = "the model belongs to the process that loaded it, which has forked; run gunicorn without --preload"
    print(f"flask_app: {message}", file=sys.stderr, flush=True)
    os._exit(3)  # gunicorn takes this for a worker that failed to boot, and ends


def main() -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in flight. The workers end with this process."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="a folder or an id of the Hugging Face hub")
    parser.add_argument("--num-gpus", type=int, help="workers: one per GPU, CPU processes without GPUs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000, help="0 takes a free one")
    options = parser.parse_args()

    server = make_server(options.host, options.port, create_app(options.model, options.num_gpus), threaded=True)
    server.daemon_threads = False  # so that closing the server waits for the requests in flight

    def stop(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown).start()  # it waits for serve_forever, which runs in this thread

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"listening on http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()
    server.server_close()


if __name__ == "__main__":
    main()
