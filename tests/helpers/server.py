"""Starts a server in the tests' own process, with a tiny model, a tokenizer of bytes, and a chat template."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from parallelformers_ng import parallelize, plan
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.app import create_app
from parallelformers_ng.serving.guard import AccessGuard
from parallelformers_ng.serving.listening import bound
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.run import Server
from parallelformers_ng.serving.serve_options import ServeOptions
from parallelformers_ng.sharding.plan import ShardPlan
from tests.helpers.patience import PROMPTLY
from tests.zoo.build import build

END = "<|end|>"
TEMPLATE = """\
{%- if tools %}{{ '<|start|>tools\\n' + (tools | tojson) + '<|end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}
{{- '<|start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' + (said | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, four marks, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken("<|start|>", special=True)])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a random Llama with the tokenizer's vocabulary; the model seldom generates an end token."""
    return build(LlamaForCausalLM, tiny_config(tokenizer))


class ScriptedModel:
    """A model without ranks that generates a fixed text, one byte per token.

    Args:
        tokenizer: tokenizer of the text.
        says: text that the model generates before the end token.
        holds: whether to wait before each token until `release` is called.

    Attributes:
        calls: keyword arguments of each call.
        cancelled: number of cancelled calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, says: str = "", holds: bool = False) -> None:
        self.tokenizer = tokenizer
        self.says = says
        self.config = tiny_config(tokenizer)
        self.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
        self.calls: list[dict[str, Any]] = []
        self.cancelled = 0
        self._may_go = asyncio.Event()
        if not holds:
            self._may_go.set()

    def can_generate(self) -> bool:
        return True

    def memory_reserved(self) -> dict[str, int]:
        return {"cpu:0": 1 << 20}

    @functools.cached_property
    def shard_plan(self) -> ShardPlan:
        return plan(tiny_model(self.tokenizer), 2)

    def release(self, running: Running) -> None:
        """Let all calls continue."""
        running.loop.call_soon_threadsafe(self._may_go.set)

    async def agenerate(self, streamer: Any, **kwargs: Any) -> None:
        self.calls.append(kwargs)
        streamer.put(kwargs["input_ids"])
        tokens = self.tokenizer(self.says)["input_ids"] + [self.tokenizer.eos_token_id]
        try:
            for token in tokens[: kwargs["generation_config"].max_new_tokens]:
                await self._may_go.wait()
                streamer.put(torch.tensor([token]))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@dataclass
class Running:
    """A running server."""

    url: str
    server: Server
    app: AccessGuard
    thread: threading.Thread

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the server."""
        return self.server.servers[0].get_loop()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds, at most `PROMPTLY` seconds."""
        end = time.monotonic() + PROMPTLY
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)


@contextmanager
def serving(model: Any, tokenizer: Any, /, kind: Kind | None = None, **options: Any) -> Iterator[Running]:
    """Serve a parallelized model on a free port, until the block ends."""
    read = ServeOptions(**{"model": "tiny", "port": 0, "client_timeout": PROMPTLY, **options})
    with bound(read) as listening:
        app = create_app(model, tokenizer, read, kind or Kind())
        server = Server(app, read, lambda: None)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            while not server.started:
                time.sleep(0.01)
            yield Running(url, server, app, thread)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(PROMPTLY)


@contextmanager
def serving_on(group: WorkerGroup, tokenizer: PreTrainedTokenizerFast) -> Iterator[Running]:
    """Serve the tiny model from the workers of a group, until the block ends."""
    with (
        parallelize(tiny_model(tokenizer), workers=group, batching=True) as model,
        serving(model, tokenizer) as server,
    ):
        yield server


def save_served_model(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Save the tiny model in the format of `parallelformers-ng serve`; return the folder."""
    tokenizer = tokenizer or tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
