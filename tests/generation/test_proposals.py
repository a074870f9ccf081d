"""Tests greedy prompt lookup: proposals, and the same tokens as without prompt lookup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from parallelformers_ng import parallelize
from parallelformers_ng.generation import proposals as module
from parallelformers_ng.generation.proposals import LatestMatch


def proposals(ids: list[int], **settings: Any) -> list[int]:
    ends = torch.tensor([9])
    settings = {"eos_token_id": ends, "num_output_tokens": 3, "max_length": 100} | settings
    generator = LatestMatch(PromptLookupCandidateGenerator(**settings))
    tensor = torch.tensor([ids])
    assert generator.get_candidates(tensor)[0] is tensor  # the prompt is read alone
    candidates, logits = generator.get_candidates(tensor)
    assert logits is None
    assert candidates[0, : len(ids)].tolist() == ids
    return candidates[0, len(ids) :].tolist()


def test_latest_match_of_most_tokens() -> None:
    assert proposals([1, 2, 3, 1, 2, 4, 5, 6, 2, 7, 1, 2]) == [4, 5, 6]
    assert proposals([1, 2, 3, 1, 2, 4, 5, 6, 2, 7, 1, 2], max_matching_ngram_size=1) == [7, 1, 2]
    assert proposals([5, 2, 3, 1, 2]) == [3, 1, 2]


def test_no_proposals() -> None:
    assert proposals([1, 2, 3]) == []
    assert proposals([1]) == []
    assert proposals([1, 2, 1], max_length=4) == []
    assert proposals([1, 2, 1], max_length=3) == []


def test_proposals_end_before_limits() -> None:
    assert proposals([1, 2, 3, 4, 1], max_length=8) == [2, 3]
    assert proposals([1, 2, 9, 4, 1]) == [2]
    assert proposals([4, 4]) == [4]


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=32, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return small_llama().bfloat16()


def test_same_tokens_as_without_prompt_lookup(llama: LlamaForCausalLM) -> None:
    ids = torch.randint(0, 32, (1, 1100))  # more rows than the kernels multiply
    parallel = parallelize(llama, 2, workers={"device": "cpu"}, progress=False)
    settings: dict[str, Any] = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "output_logits": True}

    def run(**kwargs: Any) -> tuple[Tensor, Tensor]:
        output = parallel.generate(ids, return_dict_in_generate=True, **settings, **kwargs)
        return output.sequences, torch.stack(output.logits)

    for mine, plain in zip(run(prompt_lookup_num_tokens=8), run(), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"suppress_tokens": list(range(0, 32, 3))},
        {"eos_token_id": [28, 4]},
        {"eos_token_id": list(range(0, 32, 3)), "min_length": 32},
        {"max_new_tokens": 11},
        {"assistant_confidence_threshold": 0.08},
    ],
    ids=["plain", "processor", "ends", "no early ends", "short", "confidence"],
)
def test_plain_loop_proposes_what_generate_proposes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options}
    main, assistant = small_llama(), small_llama()
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += torch.randn_like(weight) / 200
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = settings.pop("assistant_confidence_threshold", 0.0)
    usual, in_loop = AssistedCandidateGenerator.get_candidates, module._propose_in_a_plain_loop
    rounds: list[list[int]] = []

    def noted(generator: Any, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        candidates, logits = usual(generator, input_ids, **kwargs)
        rounds.append(candidates[0].tolist())
        return candidates, logits

    def proposed(loop: Any) -> list[list[int]]:
        rounds.clear()
        monkeypatch.setattr(module, "_propose_in_a_plain_loop", loop)
        ids = torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(0))
        return [main.generate(ids, assistant_model=assistant, **settings)[0].tolist(), *rounds]

    module.propose_after_prompt()
    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", noted)
    want = proposed(lambda _: None)
    assert proposed(in_loop) == want
    assert len(want) > 3
