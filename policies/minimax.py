from parallelformers_ng.sharding.rules import Column, Experts, Heads, Norm, Policy, Row, Slice


class MiniMaxLightningPolicy(Policy):
    """MiniMax's linear attention. `qkv_proj` packs q, k and v head by head, and every head has its own decay rates."""

    block = "MiniMaxLightningAttention"
    plan = {
        "": Heads("num_attention_heads"),
        "{qkv_proj,output_gate}": Column(),
        "{slope_rate,query_decay,key_decay}": Slice(0),
        "diagonal_decay": Slice(1),
        "norm": Norm(),
        "out_proj": Row(),
    }


class MiniMaxPolicy(Policy):
    """The routed experts after linear attention or Llama's attention."""

    block = "MiniMaxDecoderLayer"
    plan = {"mlp.experts": Experts()}
