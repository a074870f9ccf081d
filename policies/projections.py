from parallelformers_ng.sharding.rules import Column, Policy, Slice, Vocabulary


class ProjectionPolicy(Policy):
    """Layers cut by their outputs, which are gathered because every rank needs them.

    Most such layers, for example poolers, need no rule. The code around the layers of this policy reads weights or
    computes on parts of a result. Without a rule, the ranks would gather the weights of such layers at every call.
    """

    block = (
        "BarkFineModel", "Deimv2MultiscaleDeformableAttention", "DFineMultiscaleDeformableAttention", "DPREncoder",
        "Gemma3nTextModel", "Gemma4TextModel", "GroundingDinoModel", "MMGroundingDinoModel",
        "SeamlessM4TConformerFeatureProjection", "SeamlessM4Tv2ConformerFeatureProjection", "Zamba2HybridLayer",
    )  # fmt: skip
    optional = (
        "altup_projections.*", "altup_unembed_projections.*", "attention_weights", "embed_tokens_per_layer",
        "enc_output", "encode_proj", "input_embeds_layers.*", "linear", "lm_heads.*", "per_layer_model_projection",
        "projection", "sampling_offsets", "text_projection",
    )  # fmt: skip
    plan = dict.fromkeys(optional, Column(gather=True))


class VocabularyPolicy(Policy):
    """Embeddings and output heads that `get_input_embeddings` and `get_output_embeddings` do not return, and layers
    beside them: for entities, whose vocabulary is larger than that of words (LUKE); for a decoder with its own
    vocabulary (FSMT); and word embeddings that can be quantized (I-BERT)."""

    block = (
        "EntityPredictionHead", "FSMTDecoder", "IBertEmbeddings", "IBertLMHead", "LukeEntityEmbeddings",
        "LxmertEmbeddings", "LxmertLMPredictionHead",
    )  # fmt: skip
    optional = (
        "word_embeddings", "entity_embeddings", "embed_tokens", "dense", "entity_embedding_dense", "transform",
        "decoder", "output_projection",
    )  # fmt: skip
    plan = {
        "{word_embeddings,entity_embeddings,embed_tokens}": Vocabulary(),
        "word_embeddings.weight_integer": Slice(0),
        "{dense,entity_embedding_dense,transform.dense,decoder,output_projection}": Column(gather=True),
    }
