"""Finds the projections and the head counts of an attention module, by the names that modelling code uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from parallelformers_ng.autopolicy.proposal import Proposal
from parallelformers_ng.autopolicy.settings import setting
from parallelformers_ng.sharding.partition import Unit
from parallelformers_ng.sharding.rules import Column, Heads, Norm, Row, Rule, Slice
from parallelformers_ng.sharding.structure import Layer, Place, dotted

_QUERY = re.compile(
    r"^(q|query|queries|q_?b?_proj|query_proj|to_q|q_lin|wq|wq_b|q_linear|linear_q|fc_q|q_attn|q_up_proj)$"
)
_KEY = re.compile(r"^(k|key|keys|k_proj|key_proj|to_k|k_lin|wk|k_linear|linear_k|fc_k)$")
_VALUE = re.compile(r"^(v|value|values|v_proj|value_proj|to_v|v_lin|wv|v_linear|linear_v|fc_v)$")
_LATENT = re.compile(r"^(kv_b_proj|kv_up_proj|wkv_b|k_b_proj|v_b_proj)$")
_FUSED = re.compile(r"^(qkv|query_key_value|Wqkv|qkv_proj|c_attn|in_proj|to_qkv|att_proj|qkv_linear|in_proj_qkv)$")
_OUT = re.compile(
    r"^(o|out|o_proj|out_proj|proj|to_out|to_out\.0|dense|out_lin|wo|Wo|output|linear_out|c_proj|projection|fc_out"
    r"|linear_o|fc_o|output\.dense|o_linear|out_linear|attn_out|fc|final_linear)$"
)
_HEAD_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads", "h", "n_local_heads",
    "num_head", "attention_heads", "encoder_attention_heads", "decoder_attention_heads", "number_of_heads",
)  # fmt: skip
_ALSO_COUNTS = re.compile(r"^(?!.*(key|kv|dim)).*head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_k_heads", "kv_heads", "kv_n_heads")
_GROUPS = ("num_key_value_groups", "n_rep", "num_groups", "kv_groups", "num_kv_groups")
# (index in the module's output tuple, dimension of heads) of outputs that may be attention weights if a position bias
# comes before them.
_MORE_WEIGHTS = ((2, 1), (3, 1))


@dataclass(frozen=True)
class Attention:
    """An attention module and its projections."""

    name: str  # dotted path of the module in the model
    place: Place
    module: nn.Module
    # query projections; with latent attention, also the projections from the latent keys and values
    queries: list[Layer]
    keys: list[Layer]  # key and value projections; empty for latent attention
    fused: Layer | None  # layer that packs query, key and value projections; None if the layers are separate
    out: Layer  # output projection, beneath or beside the module
    others: list[Layer]  # all other child layers of the module

    @property
    def layers(self) -> list[Layer]:
        fused = [self.fused] if self.fused else []
        return [*self.queries, *self.keys, *fused, self.out, *self.others]

    @classmethod
    def find(cls, name: str, place: Place, module: nn.Module, by_name: dict[str, Layer]) -> Attention | None:
        """Return the attention that `module` is, judged by the names of its layers; None if it is no attention."""
        own = {key: by_name[full] for key, _ in module.named_children() if (full := dotted(name, key)) in by_name}
        queries = [layer for key, layer in own.items() if _QUERY.match(key)]
        keys = [layer for key, layer in own.items() if _KEY.match(key) or _VALUE.match(key)]
        latent = [layer for key, layer in own.items() if _LATENT.match(key)]
        fused = next((layer for key, layer in own.items() if _FUSED.match(key)), None)
        if queries and latent and not keys:
            queries, keys = queries + latent, []
        elif not (queries and keys) and fused is None:
            return None
        width = None if fused is not None or latent else queries[0].outputs
        out = _output(name, own, by_name, width, {layer.name for layer in (*queries, *keys)})
        if out is None or out is fused:
            return None
        if queries and keys:
            fused = None
        others = [layer for layer in own.values() if layer not in (*queries, *keys, fused, out)]
        return cls(name, place, module, queries, keys, fused, out, others)

    def proposal(self, live: set[str]) -> Proposal:
        """Return at most 8 alternative sets of rules; none if no attribute counts the heads."""
        width = self.out.inputs
        variants: list[dict[str, Rule]] = []
        for query, heads in _counts(self.module, _HEAD_COUNTS, width):
            key, key_heads = "", heads
            if self.keys and self.keys[0].outputs != self.queries[0].outputs:
                head = self.queries[0].outputs // heads
                count_names = _counts(self.module, _KEY_COUNTS, self.keys[0].outputs)
                matching = [count for count in count_names if count[1] * head == self.keys[0].outputs]
                if not matching:
                    continue
                key, key_heads = matching[0]
            elif count_names := _counts(self.module, _KEY_COUNTS, 0):
                key, key_heads = count_names[0]
            groups = next((g for g in _GROUPS if isinstance(vars(self.module).get(g), int)), "") if key else ""
            for scaled in self._scaled(query, heads, width):
                taken = {query, key, *scaled}
                scaled_key = self._equal(self.keys[0].outputs, taken) if self.keys and key_heads != heads else ()
                rule = Heads(query, key, groups, scaled, scaled_key, more_weights=_MORE_WEIGHTS)
                rest = self._rules(heads, key_heads, live)
                packings = self._packings(heads, key_heads)
                variants += [{self.place.path: rule, **packed, **rest} for packed in packings]
        gathered = tuple(layer.place.path for layer in sorted(self.layers, key=lambda layer: layer.name))
        return Proposal(self.place.block, "attention", tuple(variants[:8]), gathered)

    def _packings(self, heads: int, key_heads: int) -> list[dict[str, Rule]]:
        """Return alternative rules for the layer that packs q, k and v, the most likely first.

        If no layer packs q, k and v, the only alternative is an empty set of rules.
        """
        if self.fused is None:
            return [{}]
        key: Unit = "key"
        if key_heads != heads:
            packings = [Column(fused=("query", key, key)), Column(interleaved=("query", key, key))]
        elif self.fused.outputs % 3 or self.fused.outputs != 3 * self.out.inputs:
            packings = [Column()]
        else:
            packings = [Column(fused=3), Column()]
        return [{self.fused.place.path: packing} for packing in packings]

    def _scaled(self, query: str, heads: int, width: int) -> list[tuple[str, ...]]:
        own = self._equal(width, {query})
        counts = tuple(name for name in self._equal(heads, {query}) if _ALSO_COUNTS.search(name))
        options = [own + counts]
        if query.startswith("config."):
            options.append(own + counts + (query,))
        if own:
            options.append(counts)
        return list(dict.fromkeys(options))

    def _equal(self, width: int, taken: set[str]) -> tuple[str, ...]:
        attributes = vars(self.module).items()
        return tuple(name for name, value in attributes if type(value) is int and value == width and name not in taken)

    def _rules(self, heads: int, key_heads: int, live: set[str]) -> dict[str, Rule]:
        """Return rules for separate projections, norms and further parameters of the module."""
        above = self.place.path
        rules: dict[str, Rule] = {layer.place.path: Column() for layer in self.queries}
        rules |= {layer.place.path: Column("key") if key_heads != heads else Column() for layer in self.keys}
        rules[self.out.place.path] = Row(heads=above)
        for layer in self.others:
            own = layer.outputs in (heads, self.out.inputs) and not layer.name.endswith("_a_proj")
            rules[layer.place.path] = Column() if own else Column("column", gather=True)
        for key, child in self.module.named_children():
            weight = getattr(child, "weight", None)
            if "Norm" in type(child).__name__ and weight is not None and weight.ndim == 1 and self.queries:
                if weight.shape[0] == self.queries[0].outputs and heads > 1:
                    of_query = key.startswith("q") or key_heads == heads
                    rules[dotted(above, key)] = Norm("query" if of_query else "key")
                elif self.keys and weight.shape[0] == self.keys[0].outputs and key_heads > 1:
                    rules[dotted(above, key)] = Norm("key")
        for key, tensor in self.module._parameters.items():
            if tensor is not None and dotted(self.name, key) in live:
                dims = [dim for dim, size in enumerate(tensor.shape) if size in (heads, self.out.inputs)]
                rules |= {dotted(above, key): Slice(dim) for dim in dims[:1]}
        return rules


def _output(
    name: str, own: dict[str, Layer], by_name: dict[str, Layer], width: int | None, taken: set[str]
) -> Layer | None:
    """Return the output projection of attention, a descendant or a sibling of the module; None if no name fits."""
    parent = name.rpartition(".")[0]
    nearby = list(own.items())
    for above in (name, parent):
        prefix = f"{above}." if above else ""
        nearby += [(n[len(prefix) :], layer) for n, layer in by_name.items() if n.startswith(prefix)]
    for key, layer in nearby:
        if _OUT.match(key) and layer.name not in taken and not layer.is_embedding and width in (None, layer.inputs):
            return layer
    return None


def _counts(module: nn.Module, names: Sequence[str], width: int) -> list[tuple[str, int]]:
    """Return up to two attributes that may count heads, with their values: of the module, then of its configuration."""
    config = vars(module).get("config")
    values = [(name, vars(module).get(name)) for name in names]
    if config:
        values += [(f"config.{name}", setting(config, name)) for name in names]
    return [(name, value) for name, value in values if type(value) is int and value > 0 and width % value == 0][:2]
