from parallelformers_ng.sharding.rules import Column, Policy


class ProjectionPolicy(Policy):
    """The layers beside the blocks whose outputs every rank needs: projections between widths, poolers, dense layers
    before output heads, and heads and embeddings that the models do not name as such."""

    block = (
        "AlbertMLMHead", "AlbertModel", "AlbertTransformer", "BarkCausalModel", "BarkFineModel", "BertPooler",
        "BertPredictionHeadTransform", "BigBirdClassificationHead", "BigBirdModel", "BigBirdPegasusClassificationHead",
        "BigBirdPredictionHeadTransform", "Blip2ForConditionalGeneration", "Blip2Model", "BlipModel", "BlipTextPooler",
        "BlipTextPredictionHeadTransform", "CamembertClassificationHead", "CamembertLMHead", "CamembertPooler",
        "CLIPModel", "CLIPTextModelWithProjection", "CLIPVisionModelWithProjection", "ContextPooler",
        "ConvBertClassificationHead", "ConvBertGeneratorPredictions", "ConvBertModel",
        "ConvBertPredictionHeadTransform", "Data2VecAudioFeatureProjection", "Data2VecAudioForCTC",
        "Data2VecTextClassificationHead", "Data2VecTextLMHead", "Data2VecTextPooler", "DebertaEmbeddings",
        "DebertaV2Embeddings", "DeiTPooler", "DistilBertForMaskedLM", "DistilBertForMultipleChoice",
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
        "altup_projections.*", "altup_unembed_projections.*", "audio_enc_to_dec_proj", "decoder_dict.*", "dense",
        "dense_0", "embed_proj", "embed_tokens.*", "embed_tokens_per_layer", "embedding_hidden_mapping_in",
        "embedding_transformation", "embeddings_project", "enc_output", "enc_to_dec_proj", "encode_proj",
        "feature_projection", "head", "input_embeds_layers.*", "language_projection", "linear", "linear_hidden",
        "lm_head", "lm_heads.*", "logit_fc.0", "logit_fc.3", "multi_modal_projector", "per_layer_model_projection",
        "pooler", "pre_classifier", "project_in", "project_out", "projection", "reduction", "summary",
        "text_projection", "transform.dense", "visn_fc", "visual_projection", "vocab_transform",
    )  # fmt: skip
    plan = dict.fromkeys(optional, Column(gather=True))
