"""Seeded sampling: puts a new random generator into the state that a lost one had.

vLLM's second model runner has none: the noise of a draw is a function of seed and position. Its first one has a
generator for each request. On a CPU a draw takes one number from it, so that it is rebuilt in no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import CpuArchEnum, current_platform

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

_NATIVE = (CpuArchEnum.POWERPC, CpuArchEnum.RISCV)
"""Architectures on which vLLM draws as it does on a GPU."""


def forgotten(vllm_config: VllmConfig) -> tuple[str, ...]:
    """The sampling parameters whose state an engine so configured cannot rebuild."""
    if vllm_config.speculative_config is not None:
        # How many numbers a token has taken is up to the guesses.
        return ("seed",)
    if vllm_config.use_v2_model_runner or _draws_once(vllm_config):
        return ()
    return ("seed",)


def _draws_once(vllm_config: VllmConfig) -> bool:
    return (
        current_platform.is_cpu()
        and not vllm_config.model_config.use_fp64_gumbel
        and current_platform.get_cpu_architecture() not in _NATIVE
    )


class SeededSampling(torch.Generator):
    """The generator of a request on a CPU, as many draws from its seed as the request has output.

    vLLM sets a generator back by its offset when it has drawn for a part of a prompt, which is no token. Generators on
    a CPU have no offset and raise an error; set back, this one is where the output is.
    """

    def __new__(cls, _: CachedRequestState) -> SeededSampling:
        return super().__new__(cls)

    def __init__(self, state: CachedRequestState) -> None:
        self._state = state
        self._rewind()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> SeededSampling:
        self._rewind()
        return self

    def _rewind(self) -> None:
        params: Any = self._state.sampling_params
        self.manual_seed(params.seed)
        torch.randint(0, 2**31, (len(self._state.output_token_ids),), generator=self)
