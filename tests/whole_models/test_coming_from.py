"""Checks every row of `docs/coming_from_others.md`; a row without a check, or a check without a row, fails."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng import ParallelError, balanced_device_map, parallelize, plan
from parallelformers_ng.hosts import torchrun
from parallelformers_ng.options import WorkerOptions
from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.placement import placement
from tests.helpers.quantized_checkpoints import in_groups, in_turn
from tests.helpers.quantized_checkpoints import llama as quantizable
from tests.zoo.build import build

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from_others.md"
ROWS = {
    (section, old): new
    for section, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    for old, new in re.findall(r"^\| (.+?) \| (.+) \|$", text, flags=re.MULTILINE)
    if new not in ("---", "here")
}
Check = Callable[[Any], None]
CHECKS: dict[tuple[str, str], Check] = {}


class Tools:
    """Helpers of a check.

    Attributes:
        groups: function that returns the workers of a world size.
        folder: new folder.
        patch: monkeypatch, undone at the end.
    """

    def __init__(self, groups: Any, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.groups, self.folder, self.patch = groups, folder, patch

    def parallel(self, model: Any = None, **options: Any) -> Any:
        group: WorkerGroup = self.groups(2)
        return parallelize(llama() if model is None else model, workers=group, **options)

    def saved(self) -> str:
        llama().save_pretrained(self.folder)
        return str(self.folder)


def checks(section: str, beginning: str) -> Callable[[Check], Check]:
    """Make a function the check of the section's rows whose first cell begins with `beginning`."""
    keys = [key for key in ROWS if key[0].startswith(section) and key[1].startswith(beginning)]
    assert len(keys) == 1, (section, beginning, keys)

    def note(check: Check) -> Check:
        assert keys[0] not in CHECKS
        CHECKS[keys[0]] = check
        return check

    return note


def llama(heads: int = 4) -> Any:
    config = tf.LlamaConfig(
        vocab_size=64,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return build(tf.LlamaForCausalLM, config)


def same_logits(got: Any, want: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert torch.allclose(got(input_ids=ids).logits, want(input_ids=ids).logits, atol=1e-4)


def takes_devices(tools: Tools, ids: list[int]) -> None:
    tools.patch.setattr(torch.cuda, "device_count", lambda: 8)
    assert placement(len(ids), "auto", WorkerOptions(device_ids=ids).device_ids) == (len(ids), "cuda")
    with pytest.raises(ParallelError, match="device_ids names"):
        placement(len(ids) + 1, "auto", ids)


@checks("tensor_parallel", "`model = tp.tensor_parallel")
def is_in_place(tools: Tools) -> None:
    model = llama()
    with tools.parallel(model) as parallel:
        assert parallel is model
        same_logits(model, llama())
    takes_devices(tools, [0, 1])


@checks("tensor_parallel", '`["cpu", "cpu"]`')
def cpu_ranks(tools: Tools) -> None:
    assert placement(2, WorkerOptions(device="cpu").device, None) == (2, "cpu")


@checks("tensor_parallel", "`output_device=`")
def outputs_are_on_the_cpu(tools: Tools) -> None:
    with tools.parallel() as model:
        assert model(input_ids=torch.tensor([[1, 2]])).logits.device == torch.device("cpu")


@checks("tensor_parallel", "`tensor_parallel_config=")
def custom_policies(tools: Tools) -> None:
    assert plan(llama(), 2, custom_policies=LlamaPolicy).source == "custom"


@checks("tensor_parallel", "`distributed=True`")
def torchrun_is_known(tools: Tools) -> None:
    assert not torchrun.is_running()
    job = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for name, value in job.items():
        tools.patch.setenv(name, value)
    assert WorkerOptions().launcher == "auto"
    assert torchrun.is_running()
    assert torchrun.world_size(None) == 2  # test_torchrun.py runs such a job


@checks("tensor_parallel", "`with tp.save_tensor_parallel")
def saves(tools: Tools) -> None:
    with tools.parallel() as model:
        model.save_pretrained(tools.folder)
    same_logits(tf.AutoModelForCausalLM.from_pretrained(tools.folder), llama())


@checks("tensor_parallel", "`init_empty_weights`")
@checks("Accelerate", '`from_pretrained("path", device_map="auto")`')
@checks("niuload", "`model = balanced_load")
@checks("transformers", "`from_pretrained(")
def loads_a_path(tools: Tools) -> None:
    with tools.parallel(tools.saved()) as model:
        same_logits(model, llama())
        assert model.shard_plan.cut_share > 0.9
    with pytest.raises(ParallelError, match="takes no tp_plan"):
        tools.parallel(str(tools.folder), tp_plan="auto")


@checks("tensor_parallel", "training")
@checks("niuload", "training")
def training_is_refused(tools: Tools) -> None:
    with tools.parallel() as model:
        ids = torch.tensor([[1, 2, 3]])
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(ParallelError, match="training"):
            loss.backward()


def quantizes(tools: Tools, scheme: str, bits: int) -> None:
    """Check quantization of weights, and loading of a quantized checkpoint. `test_formats.py` tests other formats."""
    with tools.parallel(quantize=scheme) as model:
        assert model.shard_plan.bytes_whole < plan(llama(), 2).bytes_whole
    said = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True}
    plain = in_groups(tools.folder, quantizable, said, in_turn(32))
    with tools.parallel(str(tools.folder)) as model:
        assert model.shard_plan.bytes_whole < plan(plain, 2).bytes_whole
        assert model.shard_plan.cut_share > 0.9
        same_logits(model, plain)


@checks("tensor_parallel", "8-bit weights")
def int8(tools: Tools) -> None:
    quantizes(tools, "int8", 8)


@checks("Accelerate", "8-bit and 4-bit weights")
def int4(tools: Tools) -> None:
    quantizes(tools, "int4", 4)


@checks("Accelerate", "layers one after another")
def pipeline(tools: Tools) -> None:
    with tools.parallel(fit={"strategy": "pipeline"}) as model:
        same_logits(model, llama())
        assert model.shard_plan.strategy == "pipeline"


@checks("Accelerate", "`max_memory=")
@checks("Accelerate", "`offload_folder=`")
def offloads(tools: Tools) -> None:
    part = plan(llama(), 2).bytes_per_rank[0] * 2 // 3
    fit = {"max_memory": {0: part, 1: part, "cpu": 0}, "offload_folder": str(tools.folder / "offload")}
    with tools.parallel(fit=fit) as model:
        same_logits(model, llama())
        assert max(model.memory_allocated().values()) < plan(llama(), 2).bytes_per_rank[0]
    with pytest.raises(ParallelError, match="takes no max_memory"):
        tools.parallel(tools.saved(), max_memory={0: 1})


@checks("Accelerate", "`device_map={…}`")
def device_map_is_refused(tools: Tools) -> None:
    with pytest.raises(ParallelError, match="takes no device_map"):
        tools.parallel(tools.saved(), device_map={"": 0})


@checks("Accelerate", "`model.hf_device_map`")
def plans_say_what_lies_where(tools: Tools) -> None:
    shard_plan = plan(llama(), 2)
    assert "q_proj" in str(shard_plan)
    assert sum(shard_plan.bytes_per_rank) >= shard_plan.bytes_whole


@checks("Accelerate", "a model loaded with `device_map`")
def a_spread_model_is_refused(tools: Tools) -> None:
    model = llama()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ParallelError, match="device_map"):
        tools.parallel(model)


@checks("niuload", "`device_idx=")
def other_devices(tools: Tools) -> None:
    takes_devices(tools, [1, 2, 5, 7])


@checks("niuload", "`ratio=")
def ratio(tools: Tools) -> None:
    with tools.parallel(fit={"ratio": [1, 3]}) as model:
        same_logits(model, llama())
        small, large = model.shard_plan.bytes_per_rank
    assert 2 < large / small < 4


@checks("niuload", "a `device_map` for transformers")
def device_map_for_transformers(tools: Tools) -> None:
    assert set(balanced_device_map(llama().config, 2, ratio=[1, 3]).values()) == {0, 1}


@checks("transformers", "`torchrun")
def a_program_runs_once(tools: Tools) -> None:
    program = tools.folder / "program.py"
    program.write_text(
        "from parallelformers_ng import parallelize\nprint('once', flush=True)\n"
        f"parallelize({tools.saved()!r}, 2, workers={{'device': 'cpu'}}).deparallelize()\n"
    )
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["once"]


@checks("transformers", "the number of heads")
def heads_need_not_divide(tools: Tools) -> None:
    with tools.parallel(llama(heads=3)) as model:
        same_logits(model, llama(heads=3))
        assert model.shard_plan.cut_share > 0.9


@checks("transformers", "a model without a plan")
def a_policy_is_inferred(tools: Tools) -> None:
    with torch.device("meta"):
        model = tf.CpmAntForCausalLM(tf.CpmAntConfig())
    assert not model._tp_plan
    assert plan(model, 2).source == "inferred"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_a_row_is_true(row, groups, tmp_path, monkeypatch):
    assert row in CHECKS, f"no check of {row}"
    CHECKS[row](Tools(groups, tmp_path, monkeypatch))
