"""Imports all modules that ranks need and compares the kernels with transformers, once for all forks of a server."""

from parallelformers_ng.kernels import installation, recognition
from parallelformers_ng.runtime import service
from parallelformers_ng.worker import runner

__all__ = ["runner", "service"]

for _family in dict.fromkeys((*recognition.ATTENTIONS, *recognition.LAYERS)):
    recognition.modelling(_family, "Model")

installation.compare_before_forks()
