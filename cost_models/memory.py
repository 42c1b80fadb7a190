"""Memory of model states under ZeRO (Rajbhandari et al., SC 2020, arXiv 1910.02054, section 3 and figure 1).

P parameters; p, g and K bytes of parameter, gradient and optimizer state for each of them; N data-parallel devices:

    stage 0 (plain)                     (p + g + K) P
    stage 1 (optimizer sharded)         (p + g) P + K P / N
    stage 2 (+ gradients)               p P + (g + K) P / N
    stage 3 (+ parameters)              (p + g + K) P / N          (all four: model_states_bytes)
"""

from __future__ import annotations

from cost_models.checks import require_amount, require_count
from cost_models.errors import CostModelError


def model_states_bytes(
    num_parameters: float,
    stage: int,
    num_data_parallel: int,
    optimizer_bytes: float = 12,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
) -> float:
    """Bytes per device for parameters, gradients and optimizer state.

    Args:
        num_parameters: of the part of the model that the devices share.
        stage: of ZeRO, 0 to 3.
        num_data_parallel: devices that the states are sharded over.
        optimizer_bytes: per parameter; 12 is mixed-precision Adam (float32 copy, momentum, variance).
        parameter_bytes, gradient_bytes: per parameter; 2 in half precision.

    Raises:
        CostModelError: an unknown stage, a negative amount, no device.
    """
    for what, value in (("num_parameters", num_parameters), ("optimizer_bytes", optimizer_bytes)):
        require_amount(what, value, advice="count what the model holds")
    require_count("num_data_parallel", num_data_parallel, advice="count the devices that hold the same model")
    if stage not in (0, 1, 2, 3):
        raise CostModelError(f"The ZeRO stage is {stage!r}, but only 0, 1, 2 and 3 exist: choose one of them.")
    sizes_by_first_sharded_stage = ((3, parameter_bytes), (2, gradient_bytes), (1, optimizer_bytes))
    return num_parameters * sum(
        size / num_data_parallel if stage >= first else size for first, size in sizes_by_first_sharded_stage
    )
