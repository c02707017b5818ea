"""What a step will cost, before anything is loaded."""

from __future__ import annotations

from ..types import PromptBatch
from .run import AnyConfig, AutoencoderConfig


def arithmetic(config: AnyConfig, world: int = 1) -> dict[str, int]:
    """The numbers of one step, over all ranks unless they say otherwise."""
    if isinstance(config, AutoencoderConfig):
        share = -(-config.rows // world)
        return {"rows of data a step": config.rows, "rows a backward pass on one rank": share, "steps": config.steps}
    world = max(1, world // config.engine.context)  # those that share a row's tokens have the same rows
    batch, makes = config.batch, config.objective.consumes is PromptBatch
    samples = batch.prompts * config.objective.group if makes else 0
    guided = config.guidance is not None and config.guidance.scale != 1
    predictions = config.process.calls(config.model.shape) * (2 if guided else 1)
    experience = batch.prompts * config.objective.kept_rows()
    share = -(-experience // (world * batch.updates))
    return {
        "rows of data a step": batch.prompts,
        "samples a step": samples,
        "network calls a sample": predictions if makes else 0,
        "network calls a step to sample": samples * predictions,
        "updates a step": batch.updates * batch.epochs,
        "rows an update": experience // batch.updates,
        "rows a backward pass on one rank, at most": min(share, batch.microbatch or share),
        "updates in all": config.steps * batch.updates * batch.epochs,
    }
