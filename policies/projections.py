from parallelformers_ng.sharding.rules import Column, Policy, Slice, Vocabulary


class ProjectionPolicy(Policy):
    """Layers outside of blocks, whose outputs are gathered because every rank needs them: projections, poolers, dense
    layers before output heads, heads and embeddings that `get_output_embeddings` and `get_input_embeddings` do not
    return, and D-FINE's projections of sampling offsets and attention weights."""

    block = (
        "AlbertMLMHead", "AlbertModel", "AlbertTransformer", "BarkCausalModel", "BarkFineModel", "BertPooler",
        "BertPredictionHeadTransform", "BigBirdClassificationHead", "BigBirdModel", "BigBirdPegasusClassificationHead",
        "BigBirdPredictionHeadTransform", "Blip2ForConditionalGeneration", "Blip2Model", "BlipModel", "BlipTextPooler",
        "BlipTextPredictionHeadTransform", "CamembertClassificationHead", "CamembertLMHead", "CamembertPooler",
        "CLIPModel", "CLIPTextModelWithProjection", "CLIPVisionModelWithProjection", "ContextPooler",
        "ConvBertClassificationHead", "ConvBertGeneratorPredictions", "ConvBertModel",
        "ConvBertPredictionHeadTransform", "Data2VecAudioFeatureProjection", "Data2VecAudioForCTC",
        "Data2VecTextClassificationHead", "Data2VecTextLMHead", "Data2VecTextPooler", "DebertaEmbeddings",
        "DebertaV2Embeddings", "Deimv2MultiscaleDeformableAttention", "DeiTPooler",
        "DFineMultiscaleDeformableAttention", "DistilBertForMaskedLM", "DistilBertForMultipleChoice",
        "DistilBertForSequenceClassification", "DPREncoder", "ElectraClassificationHead",
        "ElectraDiscriminatorPredictions", "ElectraGeneratorPredictions", "ElectraModel", "EncoderDecoderModel",
        "FlaubertPoolerAnswerClass", "FlaubertPoolerEndLogits", "FunnelClassificationHead",
        "FunnelDiscriminatorPredictions", "Gemma3nTextModel", "Gemma4TextModel", "GroundingDinoModel",
        "HubertFeatureProjection", "HubertForCTC", "IBertClassificationHead", "IBertPooler",
        "InstructBlipForConditionalGeneration", "InstructBlipModel", "InstructBlipVideoForConditionalGeneration",
        "InstructBlipVideoModel", "LayoutLMPooler", "LayoutLMPredictionHeadTransform", "LEDClassificationHead",
        "LegacyDebertaPredictionHeadTransform", "LegacyDebertaV2PredictionHeadTransform",
        "LongformerClassificationHead", "LongformerLMHead", "LongformerPooler", "LukeLMHead", "LukePooler",
        "LxmertPooler", "LxmertPredictionHeadTransform", "LxmertVisualAnswerHead", "LxmertVisualFeatureEncoder",
        "LxmertVisualObjHead", "MegatronBertPooler", "MegatronBertPredictionHeadTransform", "MllamaModel",
        "MMGroundingDinoModel", "MobileBertEmbeddings", "MobileBertPooler", "MobileBertPredictionHeadTransform",
        "MPNetClassificationHead", "MPNetLMHead", "MPNetPooler", "MusicgenDecoder", "MusicgenForCausalLM",
        "MusicgenForConditionalGeneration", "MusicgenMelodyDecoder", "MusicgenMelodyForCausalLM",
        "MusicgenMelodyForConditionalGeneration", "OPTDecoder", "PaliGemmaMultiModalProjector",
        "ReformerClassificationHead", "RobertaClassificationHead", "RobertaLMHead", "RobertaPooler",
        "RobertaPreLayerNormClassificationHead", "RobertaPreLayerNormLMHead", "RobertaPreLayerNormPooler",
        "RoFormerClassificationHead", "RoFormerModel", "RoFormerPredictionHeadTransform",
        "SeamlessM4TConformerFeatureProjection", "SeamlessM4Tv2ConformerFeatureProjection", "SEWForCTC", "SEWModel",
        "SEWUpsampling", "SiglipTextModel", "SiglipTextTransformer", "SpeechEncoderDecoderModel", "SqueezeBertPooler",
        "SqueezeBertPredictionHeadTransform", "SwinPatchMerging", "Swinv2PatchMerging", "TapasPooler",
        "TapasPredictionHeadTransform", "UniSpeechFeatureProjection", "UniSpeechForCTC",
        "UniSpeechSatFeatureProjection", "UniSpeechSatForCTC", "VisionEncoderDecoderModel", "VisualBertEmbeddings",
        "VisualBertPooler", "VisualBertPredictionHeadTransform", "Wav2Vec2FeatureProjection", "Wav2Vec2ForCTC",
        "WavLMFeatureProjection", "WavLMForCTC", "XLMPoolerAnswerClass", "XLMPoolerEndLogits",
        "XLMRobertaClassificationHead", "XLMRobertaLMHead", "XLMRobertaPooler", "XLMRobertaXLClassificationHead",
        "XLMRobertaXLLMHead", "XLMRobertaXLPooler", "XLNetSequenceSummary", "Zamba2HybridLayer",
    )  # fmt: skip
    optional = (
        "altup_projections.*", "altup_unembed_projections.*", "attention_weights", "audio_enc_to_dec_proj",
        "decoder_dict.*", "dense", "dense_0", "embed_proj", "embed_tokens.*", "embed_tokens_per_layer",
        "embedding_hidden_mapping_in", "embedding_transformation", "embeddings_project", "enc_output",
        "enc_to_dec_proj", "encode_proj", "feature_projection", "head", "input_embeds_layers.*", "language_projection",
        "linear", "linear_hidden", "lm_head", "lm_heads.*", "logit_fc.0", "logit_fc.3", "multi_modal_projector",
        "per_layer_model_projection", "pooler", "pre_classifier", "project_in", "project_out", "projection",
        "reduction", "sampling_offsets", "summary", "text_projection", "transform.dense", "visn_fc",
        "visual_projection", "vocab_transform",
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
        "word_embeddings": Vocabulary(),
        "word_embeddings.weight_integer": Slice(0),
        "entity_embeddings": Vocabulary(),
        "embed_tokens": Vocabulary(),
        "dense": Column(gather=True),
        "entity_embedding_dense": Column(gather=True),
        "transform.dense": Column(gather=True),
        "decoder": Column(gather=True),
        "output_projection": Column(gather=True),
    }
