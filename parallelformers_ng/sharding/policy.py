"""The vocabulary in which a policy says how a block is cut. Data only: no torch, no arithmetic.

A policy names a *block* (a module class of the modelling code, usually one layer) and gives each layer beneath it
a rule. The words are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053):

    hidden ─┬─► Column ──► (each rank: its heads, its columns) ──► Row ─► all-reduce ─► hidden
            └─► Column ──┘

`builder.py` turns a policy, a model skeleton and a world size into slices; nothing here computes one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from parallelformers_ng.errors import PolicyError

Unit = Literal["", "query", "key", "column"]
"""What a layer's width is counted in: query heads, key/value heads or plain columns. "" is "query" beneath a module
with a `Heads` rule and "column" elsewhere."""

Place = int | str
"""Where a tensor is among the outputs of a module: an index in a tuple or a key in a dictionary."""


class _Word:
    """Says which arguments a word takes where it is given others."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if args or kwargs:  # a copy is made without, and filled afterwards
            signature = inspect.signature(cls)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                near = [found for name in kwargs for found in difflib.get_close_matches(name, signature.parameters, 1)]
                hint = f" (did you mean {near[0]!r}?)" if near and near[0] not in kwargs else ""
                takes = ", ".join(signature.parameters) or "nothing"
                raise PolicyError(f"{cls.__name__}: {error}{hint}; it takes {takes}") from None
        return super().__new__(cls)


@dataclass(frozen=True)
class Part(_Word):
    """One of several projections packed in one layer whose heads differ in width: the pieces of a state-space mixer.

    Args:
        unit: "query" or "key": which heads it is made of.
        width: columns of one of them, as a number or as the attribute that holds it, on the module with the `Heads`
            rule.
    """

    unit: Unit
    width: int | str


@dataclass(frozen=True)
class Rule(_Word):
    """Base of all rules."""


@dataclass(frozen=True)
class Column(Rule):
    """Cut a layer's outputs: each rank computes some of them, nothing is exchanged.

    Args:
        unit: what the outputs are counted in; "key" marks key and value projections of a model with fewer key/value
            than query heads.
        fused: projections packed side by side along the output. A number means that many equal parts (`gate|up` is 2,
            `q|k|v` is 3); a tuple names each part's unit (`("query", "key", "key")` for q|k|v with fewer k/v heads).
            Each part is cut on its own; one whose heads have a width of their own is a `Part`. Projections interleaved
            *per head* (Bloom) are one part: a head is contiguous.
        interleaved: projections packed within the group of each key/value head. `("query", "key", "key")` is the
            group's query heads, then its k, then its v, then the next group (Falcon; one group is multi-query).
        heads: path of the `Heads` rule that counts this layer, where it is not the nearest one above.
        gather: put the cut outputs together again, for a layer whose reader needs all of them.
        gather_inputs: put the inputs together first, for a layer that reads all of a width that another one cut.
        widths: attributes of the module that holds the layer that are as large as its outputs are many (`conv_dim`),
            where the forward reads them.
    """

    unit: Unit = ""
    fused: int | tuple[Unit | Part, ...] = 1
    interleaved: tuple[Unit | Part, ...] = ()
    heads: str | None = None
    gather: bool = False
    gather_inputs: bool = False
    widths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row(Rule):
    """Cut a layer's inputs; the ranks' partial outputs are summed. Its bias lives on rank 0, so it is added once.

    Args:
        unit: what the inputs are counted in, as in `Column`.
        fused: parts packed side by side along the input, as in `Column`.
        heads: path of the `Heads` rule that counts this layer, where it is not the nearest one above.
        reduce: sum the partial outputs here. False where a later rule (`Reduce`) sums for several layers at once.
    """

    unit: Unit = ""
    fused: int | tuple[Unit, ...] = 1
    heads: str | None = None
    reduce: bool = True


@dataclass(frozen=True)
class Heads(Rule):
    """Says that a module is attention: layers beneath it are cut by whole heads.

    Attribute names are relative to the module; `config.x` is read from the module's configuration. A count read there
    is left as it is unless it is also among the scaled ones: most forwards do not look at it again.

    Args:
        query: attribute that holds the number of query heads.
        key: attribute that holds the number of key/value heads; "" where `groups` says it, or where it is the number
            of query heads.
        groups: attribute that holds query heads per key/value head, "" where the module has none.
        scaled: further attributes, proportional to the query heads, that the forward reads (`embed_dim`, …).
        scaled_key: the same for attributes proportional to the key/value heads.
        weights: place of the attention weights among the module's outputs: an index, a key, or several one after
            another; None where it gives none of its own.
        weights_dim: their dimension of heads.
        more_weights: further outputs with a dimension of heads, as `(place, dimension)`.
        biases: keyword arguments of the forward that hold a value for every head of the model, made outside the module
            (ALiBi). Each rank takes those of its heads: dimension 1 of four or more, or dimension 0 (batch × heads) of
            three.
        fresh: attributes that keep a state from call to call, as wide as all heads; a rank begins without.
        input_width: the forward takes the width of its merged heads from its input and not from an attribute.
        layer: the parallel layer that computes this attention, for one whose forward cannot work on a share of the
            heads as it is; "" for all others.
    """

    query: str
    key: str = ""
    groups: str = ""
    scaled: tuple[str, ...] = ()
    scaled_key: tuple[str, ...] = ()
    weights: Place | tuple[Place, ...] | None = 1
    weights_dim: int = 1
    more_weights: tuple[tuple[Place | tuple[Place, ...], int], ...] = ()
    biases: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    input_width: bool = False
    layer: Literal["", "ngram_attention", "reformer_attention", "wavlm_attention", "xlnet_attention"] = ""


@dataclass(frozen=True)
class Experts(Rule):
    """Cut every expert of a mixture by width: gate and up by columns, down by rows, the outputs summed.

    For modules that stack experts as 3-D parameters `gate_up_proj` (or `up_proj`) and `down_proj`. Their geometry
    (transposed, gate and up side by side or interleaved, biases) comes from the attributes of transformers' experts
    interface.

    Args:
        reduce: sum the partial outputs here. False where a later rule (`Reduce`) sums for several layers at once.
    """

    reduce: bool = True


@dataclass(frozen=True)
class Slice(Rule):
    """Cut a bare parameter or buffer along one dimension, nothing is exchanged.

    Args:
        dim: the dimension to cut.
        unit: what that dimension is counted in, as in `Column`.
        fused: parts packed along it, as in `Column`, or the attribute that holds their number, on the module with the
            `Heads` rule.
        heads: path of the `Heads` rule that counts it, where it is not the nearest one above.
        partial: its products are summed over the ranks, so a rank without heads holds zeros.
    """

    dim: int
    unit: Unit = ""
    fused: int | str | tuple[Unit | Part, ...] = 1
    heads: str | None = None
    partial: bool = False


@dataclass(frozen=True)
class Reduce(Rule):
    """Sum a module's output over the ranks, for one whose cut layers or parameters leave partial sums."""


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Cut an embedding by rows: each rank looks up the ids that it holds, and the results are summed. Needed for tables
    that the model does not name as its input embeddings."""


@dataclass(frozen=True)
class Stored(Rule):
    """Hold some rows of a module's tensors, and put all of them together whenever they are read: for a table that the
    forward does more with than look up rows (a codebook it searches, positions it interpolates).

    Args:
        names: its parameters and buffers, none of which the forward may write to.
    """

    names: tuple[str, ...] = ("weight",)


@dataclass(frozen=True)
class Gather(Rule):
    """Put a module's cut outputs together, for one that uses the weights of a cut layer past that layer.

    Args:
        layer: path, beneath the module, of the layer whose outputs it computes.
    """

    layer: str


@dataclass(frozen=True)
class Renewed(Rule):
    """Says that a module may put another attention in the place of one of its own while it runs (`set_attention_type`);
    the new one takes over the share of heads.

    Args:
        attention: name of the child that is replaced, which has a `Heads` rule above this one.
    """

    attention: str


@dataclass(frozen=True)
class Norm(Rule):
    """Normalise cut outputs by the root mean square of all of them, as the whole model does; the ranks sum their
    squares. Groups of columns with a root mean square each, and a gate, come from the norm itself.

    A norm per head needs no rule: its width is not cut.

    Args:
        unit: what the width is counted in, as in `Column`.
        heads: path of the `Heads` rule that counts it, where it is not the nearest one above.
    """

    unit: Unit = ""
    heads: str | None = None


@dataclass(frozen=True)
class HeadNorms(Rule):
    """Apply to each head its own norm, for a module that keeps one per head in a list `norms`. All ranks hold all of
    them.

    Args:
        unit: "query" or "key": which heads they are.
    """

    unit: Unit = "query"


@dataclass(frozen=True)
class GaussianTopK(Rule):
    """Keep of cut outputs those that stand out from the mean and the deviation of all of them; the ranks sum both. For
    a module whose forward does so in `_gaussian_topk` (Gemma 3n's MLP)."""


class Policy:
    """How the layers of one block class are cut. Subclass it; write no methods.

    Attributes:
        block: class name of the module the plan's paths are relative to, or several that share one layout. A name that
            families share is preceded by its package: "ctrl.EncoderLayer".
        plan: path beneath the block → rule. "" is the block itself, and a `*` stands for any one name. A path matches
            in every block of the model where it exists and must match in at least one.
        optional: paths (each with all that lies beneath) that a configuration may leave out, e.g. cross-attention.
        holds: paths of layers without which a module of that name is another block, as in an earlier release of
            transformers; the policy then leaves it alone. Policies for several layouts of one
            block hold different ones.
        requires: attribute path beneath the block → the value for which the plan is right, for settings that change how
            the forward computes. A model with another value is refused.
    """

    block: ClassVar[str | tuple[str, ...]] = ()
    plan: ClassVar[dict[str, Rule]] = {}
    optional: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[dict[str, object]] = {}

    @classmethod
    def blocks(cls) -> tuple[str, ...]:
        return (cls.block,) if isinstance(cls.block, str) else tuple(cls.block)


def moved(plan: Mapping[str, Rule], path: str, to: str) -> dict[str, Rule]:
    """A plan for blocks that hold a module under another name: what it says of `path`, and of all that lies beneath,
    it says of `to`; "" is the block itself. The other rules stay."""

    def place(name: str) -> str:
        inner = name.removeprefix(f"{path}.")
        if name != path and inner == name:
            return name
        return to if name == path else f"{to}.{inner}".removeprefix(".")

    def counted(rule: Rule) -> Rule:
        heads: str | None = getattr(rule, "heads", None)
        return rule if heads is None else replace(rule, heads=place(heads))  # type: ignore[call-arg]

    return {place(name): counted(rule) for name, rule in plan.items()}
