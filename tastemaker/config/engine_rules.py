"""Rules of the `engine` section: settings that exclude each other, and numbers of ranks.

Each rule is a function that returns a message, or None if the rule holds.
"""

from __future__ import annotations

from ..core.lora import Lora
from ..processes.autoregressive import AutoregressiveProcess
from .schema import AnyConfig, AutoencoderRunConfig, RunConfig


def check_hsdp_replicas(config: AnyConfig, world_size: int) -> str | None:
    replicas = config.engine.hsdp_replicas
    if config.engine.strategy != "hsdp" or world_size % replicas == 0:
        return None
    return (
        f"engine.hsdp_replicas: {world_size} ranks cannot be divided into {replicas} replicas; start a multiple "
        f"of {replicas} ranks with torchrun, or change engine.hsdp_replicas [TM795]"
    )


def check_context_parallel(config: AnyConfig, world_size: int) -> str | None:
    size = config.engine.context_parallel
    if size > 1 and not (isinstance(config, RunConfig) and config.model.supports_context_parallel):
        return (
            f"engine.context_parallel: {size}, but ranks can share the tokens of FLUX, FLUX Kontext, FLUX.2, "
            "Qwen-Image, Wan, LTX-Video and LTX-2 only; set engine.context_parallel=1 [TM920]"
        )
    if world_size == 1 or world_size % size == 0:
        return None
    return (
        f"engine.context_parallel: {world_size} ranks cannot be divided into groups of {size}; start a multiple "
        f"of {size} ranks with torchrun, or change engine.context_parallel [TM796]"
    )


def check_cuda_graphs(config: AnyConfig, world_size: int) -> str | None:
    engine = config.engine
    settings = {
        "compile": engine.compile,
        "strategy": engine.strategy != "replicated",
        "context_parallel": engine.context_parallel > 1,
    }
    conflicts = [name for name, active in settings.items() if active]
    if not engine.cuda_graphs or not conflicts:
        return None
    return (
        f"engine.cuda_graphs: CUDA graphs cannot be combined with engine.{conflicts[0]}; set "
        f"engine.cuda_graphs=false, or remove engine.{conflicts[0]} [TM797]"
    )


def check_cpu_offload(config: AnyConfig, world_size: int) -> str | None:
    strategy = config.engine.strategy
    if not config.engine.cpu_offload:
        return None
    if not isinstance(config, RunConfig):
        return "engine.cpu_offload: only generators train with weights in host memory; remove it [TM931]"
    if strategy in ("fsdp", "hsdp"):
        return None
    reason = "keeps all weights on the device from forward to backward" if strategy == "sdp" else "shards no weights"
    return (
        f"engine.cpu_offload: engine.strategy is {strategy}, which {reason}; set engine.strategy=fsdp, also for one "
        "GPU, or remove engine.cpu_offload"
        " [TM930]"
    )


def check_base_precision(config: AnyConfig, world_size: int) -> str | None:
    engine, key = config.engine, f"engine.base_precision: {config.engine.base_precision}"
    if engine.base_precision == "same":
        return None
    if not isinstance(config, RunConfig) or not config.tuning.is_adapter:
        return f"{key}, but only adapters leave the weights of the network frozen; set tuning.type=lora [TM2607]"
    if isinstance(config.process, AutoregressiveProcess):
        return f"{key}, but token decoders keep the precision of their weights; remove it [TM2608]"
    conflicts = {"cuda_graphs": engine.cuda_graphs, "strategy": engine.strategy != "replicated"}
    conflict = next((name for name, active in conflicts.items() if active), None)
    return None if conflict is None else f"{key} cannot be combined with engine.{conflict}; remove one [TM2609]"


def check_rollout_precision(config: AnyConfig, world_size: int) -> str | None:
    engine, key = config.engine, f"engine.rollout_precision: {config.engine.rollout_precision}"
    if engine.rollout_precision == "same":
        return None
    if not isinstance(config, RunConfig):
        return f"{key}, but only generators sample while they train; remove it [TM2603]"
    if engine.rollout_precision == engine.precision:
        return None
    if engine.rollout_precision == "bf16" and engine.base_precision != "same":
        return f"{key}, but engine.base_precision keeps the weights in 8 bits; set engine.precision=bf16 [TM2680]"
    problem = find_ratio_problem(config, key) or find_token_decoder_problem(config, key)
    if problem:
        return problem
    conflicts = {"cuda_graphs": engine.cuda_graphs, "strategy": engine.strategy != "replicated"}
    conflict = next((name for name, active in conflicts.items() if active), None)
    if conflict is None:
        return None
    return f"{key} cannot be combined with engine.{conflict}; remove one of them [TM2605]"


def find_ratio_problem(config: RunConfig, key: str) -> str | None:
    """Why the objective's probability ratios do not allow samples of another precision; None if they do."""
    objective, process = config.objective, config.process
    if not objective.uses_rollout_ratios():
        return None
    if not (isinstance(process, AutoregressiveProcess) and objective.corrects_rollout_precision):
        return (
            f"{key}, but {type(objective).__name__} divides by the probabilities of the network that sampled, "
            "so its first ratio would not be 1, and scoring every step again would cost more calls than 8 bits save; "
            "set engine.rollout_precision=same, or use an objective that needs only the samples, such as nft or "
            "elbo_grpo, or grpo on an autoregressive model [TM2604]"
        )
    if process.recompute_log_probs:
        return None
    return (
        f"{key}, but process.recompute_log_probs is false, so ratios would divide by probabilities of the 8-bit "
        "rollouts; set process.recompute_log_probs=true, or engine.rollout_precision=same [TM2691]"
    )


def find_token_decoder_problem(config: RunConfig, key: str) -> str | None:
    """Why the model's token decoder does not multiply weights of this precision; None if it does, or has none."""
    if not isinstance(config.process, AutoregressiveProcess):
        return None
    if not config.model.supports_8bit_decoding:
        return (
            f"{key}, but the token decoder of {type(config.model).__name__} keeps the precision of its weights, "
            "because it calls layers one by one and not in a CUDA graph; those of LlamaGen and of the playground's "
            "causal model read 8 bits; remove it [TM2606]"
        )
    if config.engine.rollout_precision != "bf16":
        return None
    return f"{key}, but token decoders compute in engine.precision; set fp8 or int8 for 8-bit weights, or same [TM2692]"


def check_merged_rollouts(config: AnyConfig, world_size: int) -> str | None:
    if not isinstance(config, RunConfig) or not isinstance(config.tuning, Lora) or not config.tuning.merge_rollouts:
        return None
    if config.objective.uses_rollout_ratios():
        return (
            f"tuning.merge_rollouts: {type(config.objective).__name__} divides by the probabilities of the network "
            "that sampled, which merged weights round differently, so its first ratio would not be 1; remove it, or "
            "use an objective that needs only the samples, such as nft or elbo_grpo [TM2750]"
        )
    if isinstance(config.process, AutoregressiveProcess):
        return "tuning.merge_rollouts: token decoders have their own way to merge adapters; remove it [TM2751]"
    engine = config.engine
    settings = {
        "base_precision": engine.base_precision != "same",
        "cuda_graphs": engine.cuda_graphs,
        "strategy": engine.strategy != "replicated",
    }
    conflict = next((name for name, active in settings.items() if active), None)
    if conflict is None:
        return None
    return f"tuning.merge_rollouts cannot be combined with engine.{conflict}; remove one of them [TM2752]"


def check_activation_memory(config: AnyConfig, world_size: int) -> str | None:
    engine = config.engine
    if engine.activation_memory == "auto" and not isinstance(config, RunConfig | AutoencoderRunConfig):
        return (
            "engine.activation_memory: auto, but the memory of judges and preference models is not estimated; set it "
            "to keep or checkpoint [TM2650]"
        )
    if engine.checkpointed_blocks is None or engine.activation_memory == "checkpoint":
        return None
    return (
        f"engine.checkpointed_blocks: {engine.checkpointed_blocks}, but engine.activation_memory is "
        f"{engine.activation_memory}; set engine.activation_memory=checkpoint, or remove engine.checkpointed_blocks "
        "[TM2651]"
    )


def check_asynchronous_checkpoints(config: AnyConfig, world_size: int) -> str | None:
    if not config.checkpoint.asynchronous or isinstance(config, RunConfig):
        return None
    return "checkpoint.asynchronous: only generators save while they train; remove it [TM2601]"


ENGINE_RULES = (
    check_hsdp_replicas,
    check_context_parallel,
    check_cuda_graphs,
    check_cpu_offload,
    check_base_precision,
    check_rollout_precision,
    check_merged_rollouts,
    check_activation_memory,
    check_asynchronous_checkpoints,
)
