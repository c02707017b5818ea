"""What a step will cost, before anything is loaded."""

from __future__ import annotations

from .schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig


def compute_step_counts(config: AnyConfig, world: int = 1) -> dict[str, int]:
    """The numbers of one step, over all ranks unless they say otherwise."""
    if isinstance(config, AutoencoderRunConfig | JudgeRunConfig):
        share = min(-(-config.rows // world), config.microbatch or config.rows)
        return {"rows of data a step": config.rows, "rows a backward pass on one rank": share, "steps": config.steps}
    world = max(1, world // config.engine.context)  # those that share a row's tokens have the same rows
    batch, objective = config.batch, config.objective
    guided = 2 if config.guidance is not None and config.guidance.scale != 1 else 1
    samples, calls = objective.samples(), guided * objective.calls(config.process.calls(config.model.shape))
    experience = batch.prompts * objective.kept_rows()
    share = -(-experience // (world * batch.updates))
    return {
        "rows of data a step": batch.prompts,
        "samples a step": batch.prompts * samples,
        "network calls a sample": -(-calls // max(1, samples)),
        "network calls a step to sample": batch.prompts * calls,
        "updates a step": batch.updates * batch.epochs,
        "rows an update": experience // batch.updates,
        "rows a backward pass on one rank, at most": min(share, batch.microbatch or share),
        "updates in all": config.steps * batch.updates * batch.epochs,
    }
