"""The worker's sampler: per-slot state, penalties, filters, draws and log-probabilities."""

from engine.sampling.logprobs import LogprobTensors
from engine.sampling.registry import SAMPLING_BACKENDS, create_sampling_backend
from engine.sampling.sampler import HostTokens, SampledTokens, Sampler
from engine.sampling.state import SamplingState

__all__ = [
    "SAMPLING_BACKENDS",
    "HostTokens",
    "LogprobTensors",
    "SampledTokens",
    "Sampler",
    "SamplingState",
    "create_sampling_backend",
]
