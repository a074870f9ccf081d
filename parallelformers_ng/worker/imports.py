"""Does, once for all forks of a fork server, what every rank needs: imports modules, compares the kernels with
transformers' code, and computes digests of that code."""

from parallelformers_ng.kernels import installation, recognition
from parallelformers_ng.live_code.changes import remember_functions
from parallelformers_ng.runtime import service
from parallelformers_ng.worker import runner

__all__ = ["runner", "service"]

_families = dict.fromkeys((*recognition.ATTENTIONS, *recognition.LAYERS))
_models = [recognition.modelling(family, "ForCausalLM") for family in _families]
installation.compare_before_forks()
remember_functions(_models)
