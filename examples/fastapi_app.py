"""Serves a parallelized model with FastAPI.

`GET /generate_text/{text}` returns `{"inputs": …, "outputs": …}`. `GET /stream_text/{text}` streams the generated text.

    python examples/fastapi_app.py --model examples/demo_model --num-gpus 2
    curl --no-buffer http://127.0.0.1:8000/stream_text/And%20it%20came%20to%20pass

The server also runs with the command `uvicorn`. The settings are then $MODEL, $NUM_GPUS and $MAX_NEW_TOKENS:

    MODEL=examples/demo_model uvicorn --app-dir examples fastapi_app:app --timeout-graceful-shutdown 30

The lifespan hook loads the model in the process that serves. Use only one worker of uvicorn or gunicorn, because each
worker loads its own model.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import AsyncTextIteratorStreamer, AutoModelForCausalLM, AutoTokenizer

from parallelformers_ng import parallelize
from parallelformers_ng.errors import GroupError

DEMO_MODEL = str(Path(__file__).resolve().parent / "demo_model")
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", 60))

NewTokens = Annotated[int, Query(ge=1, le=MAX_NEW_TOKENS)]

log = logging.getLogger("uvicorn.error")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load and parallelize the model before the first request. The model's workers end with this process."""
    name = os.environ.get("MODEL", DEMO_MODEL)
    app.state.tokenizer = AutoTokenizer.from_pretrained(name)
    app.state.model = AutoModelForCausalLM.from_pretrained(name)
    parallelize(app.state.model, num_gpus=int(os.environ.get("NUM_GPUS", 0)) or None)
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/generate_text/{text:path}")
def generate_text(text: str, max_new_tokens: NewTokens = MAX_NEW_TOKENS) -> dict[str, str]:
    """Return the generated text. FastAPI runs this function in a thread, and concurrent calls are decoded together."""
    outputs = app.state.model.generate(**tokenize(text), max_new_tokens=max_new_tokens)
    return {"inputs": text, "outputs": app.state.tokenizer.decode(outputs[0], skip_special_tokens=True)}


@app.get("/stream_text/{text:path}")
async def stream_text(text: str, max_new_tokens: NewTokens = MAX_NEW_TOKENS) -> StreamingResponse:
    """Stream the generated text without the prompt."""
    return StreamingResponse(pieces(tokenize(text), max_new_tokens), media_type="text/plain; charset=utf-8")


@app.get("/health")
def health() -> dict[str, Any]:
    """Return the memory of every worker. The workers answer after the earlier requests."""
    return {"memory_allocated": app.state.model.memory_allocated()}


@app.exception_handler(GroupError)
async def unavailable(request: Request, error: GroupError) -> JSONResponse:
    """Return status 503 if a worker died or a request took too long. Workers restart if the weights are kept."""
    log.error("%s", error)
    return JSONResponse({"error": type(error).__name__}, status_code=503)


def tokenize(text: str) -> dict[str, torch.Tensor]:
    inputs = app.state.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise HTTPException(400, "the text has no tokens")
    return inputs


class ClientGone(Exception):
    """Raised in `generate` after the client has disconnected."""


class ClientStreamer(AsyncTextIteratorStreamer):
    """Streamer of text pieces to one client.

    After the client has disconnected, `put` raises an error, which stops the request on all ranks.
    """

    def __init__(self) -> None:
        super().__init__(app.state.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.client_left = threading.Event()
        self.tokens = 0

    def put(self, value: torch.Tensor) -> None:
        if self.client_left.is_set():
            raise ClientGone
        if not self.next_tokens_are_prompt:
            self.tokens += 1
        super().put(value)


async def pieces(inputs: dict[str, torch.Tensor], max_new_tokens: int) -> AsyncIterator[str]:
    """Run `generate` in a thread and yield its text piece by piece. Closing the generator stops the request."""
    streamer = ClientStreamer()

    def generate() -> None:
        try:
            app.state.model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer)
        except ClientGone:
            log.info("client left; stopped after %d of %d tokens", streamer.tokens, max_new_tokens)
        finally:
            streamer.on_finalized_text("", stream_end=True)  # ends the loop below, even after an error

    running = asyncio.create_task(run_in_threadpool(generate))
    try:
        async for piece in streamer:
            if piece:
                yield piece
        await running  # raises the error of `generate`; the client then gets an incomplete response
    finally:
        streamer.client_left.set()


def main() -> None:
    """Serve until SIGTERM or Ctrl-C; uvicorn completes the running requests before the end."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="model folder, or name on the Hugging Face hub")
    parser.add_argument("--num-gpus", type=int, help="number of workers: one per GPU, or CPU processes without GPUs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 is any free port")
    options = parser.parse_args()
    if options.model is not None:
        os.environ["MODEL"] = options.model
    if options.num_gpus is not None:
        os.environ["NUM_GPUS"] = str(options.num_gpus)
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=30)


if __name__ == "__main__":
    main()
