"""Serves a parallelized model with Flask.

`GET /generate_text/<text>` returns `{"inputs": …, "outputs": …}`, and `GET /health` returns the memory of the workers.

    python examples/flask_app.py --model examples/demo_model --num-gpus 2
    curl http://127.0.0.1:5000/generate_text/And%20it%20came%20to%20pass

For production, run the application with gunicorn, one worker and many threads:

    MODEL=examples/demo_model gunicorn --pythonpath examples --workers 1 --threads 16 'flask_app:create_app()'

Use only one gunicorn worker, because each worker loads its own model. Do not use `--preload`: gunicorn would call
`create_app` before it forks, and only the process that parallelized a model can use the model. The server then prints
an error and ends.
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
        model_name: model folder, or name on the Hugging Face hub; by default $MODEL, or the demo model without $MODEL.
        num_gpus: number of workers; by default $NUM_GPUS; without $NUM_GPUS, all GPUs, or 2 CPU workers without a GPU.
    """
    model_name = model_name or os.environ.get("MODEL", DEMO_MODEL)
    num_gpus = num_gpus or int(os.environ.get("NUM_GPUS", 0)) or None
    max_new_tokens = int(os.environ.get("MAX_NEW_TOKENS", 60))
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name)
    parallelize(model, num_gpus=num_gpus)
    os.register_at_fork(after_in_child=refuse_to_serve)

    app = Flask(__name__)
    app.url_map.merge_slashes = False  # the text may contain double slashes

    @app.get("/generate_text/<path:text>")
    def generate_text(text: str) -> dict[str, str]:
        """Return the generated text. Each request has a thread, and concurrent calls are decoded together."""
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        if inputs["input_ids"].numel() == 0:
            abort(400, "the text has no tokens")
        outputs: torch.Tensor = model.generate(**inputs, max_new_tokens=max_new_tokens)
        return {"inputs": text, "outputs": tokenizer.decode(outputs[0], skip_special_tokens=True)}

    @app.get("/health")
    def health() -> dict[str, Any]:
        """Return the memory of every worker. The workers answer after the earlier requests."""
        return {"memory_allocated": model.memory_allocated()}

    @app.errorhandler(GroupError)
    def unavailable(error: GroupError) -> tuple[dict[str, str], int]:
        """Return status 503 if a worker died or a request took too long. Workers restart if the weights are kept."""
        app.logger.error("%s", error)
        return {"error": type(error).__name__}, 503

    return app


def refuse_to_serve() -> None:
    """End a process that was forked after the model was parallelized. Such a process cannot use the model."""
    message = "a forked process cannot use the model of its parent process; run gunicorn without --preload"
    print(f"flask_app: {message}", file=sys.stderr, flush=True)
    os._exit(3)  # with exit status 3, gunicorn ends because a worker has failed to start


def main() -> None:
    """Serve until SIGTERM or Ctrl-C, then complete the running requests. The model's workers end with this process."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="model folder, or name on the Hugging Face hub")
    parser.add_argument("--num-gpus", type=int, help="number of workers: one per GPU, or CPU processes without GPUs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000, help="port; 0 is any free port")
    options = parser.parse_args()

    server = make_server(options.host, options.port, create_app(options.model, options.num_gpus), threaded=True)
    server.daemon_threads = False  # so that `server_close` waits for the running requests

    def stop(number: int, frame: FrameType | None) -> None:
        # `shutdown` waits for `serve_forever`, which runs in the main thread.
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"listening on http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()
    server.server_close()


if __name__ == "__main__":
    main()
