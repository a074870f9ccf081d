"""Importing this imports all that ranks import sooner or later: what a fork server has done once for all of them."""

from parallelformers_ng.kernels import recognition
from parallelformers_ng.runtime import service
from parallelformers_ng.worker import runner

__all__ = ["runner", "service"]

for _family in dict.fromkeys((*recognition.ATTENTIONS, *recognition.LAYERS)):
    recognition.modelling(_family, "Model")
