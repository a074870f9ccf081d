from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row

HEADS = {
    "attention": Heads("num_heads", scaled=("embed_dim",)),
    "attention.{q,k,v}_proj": Column(),
}
ATTENTION = {**HEADS, "attention.o_proj": Row()}


class DINOv3Policy(Policy):
    """ViT's block with rotary positions. The larger models have a gated MLP."""

    block = "DINOv3ViTLayer"
    plan = {**ATTENTION, **MLP}
    optional = ("mlp.gate_proj",)
