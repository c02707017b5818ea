"""Checks of the data of a run: whether the objective trains on its batches, and whether their proportions work out."""

from __future__ import annotations

from ..core.types import (
    ImageBatch,
    JointBatch,
    LatentBatch,
    LikeBatch,
    PreferenceBatch,
    PromptBatch,
    QuestionAnswerBatch,
    TokenBatch,
)
from ..data.joint import JointData
from ..models.dit import DitSpec
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from .dump import registered_name
from .schema import RunConfig

BATCH_NAMES = {
    PromptBatch: "prompts",
    ImageBatch: "captioned images",
    PreferenceBatch: "preference pairs",
    LikeBatch: "likes and dislikes",
    TokenBatch: "tokens",
    LatentBatch: "latents",
    QuestionAnswerBatch: "questions with answers",
    JointBatch: "captioned images, texts and questions",
}
DATA_TYPES = {
    PromptBatch: "prompts or prompt_file",
    ImageBatch: "toy_images or captioned_folder",
    PreferenceBatch: "toy_pairs or pair_file",
    LikeBatch: "toy_likes, like_votes or like_file",
    JointBatch: "joint",
}  # registered types that yield such batches


def check_objective_data(config: RunConfig, world_size: int) -> str | None:
    batch_type, expected = config.data.batch_type, config.objective.consumes
    if batch_type is expected or batch_type in config.objective.also_consumes:
        return None
    needs, yields = (BATCH_NAMES.get(kind, kind.__name__) for kind in (expected, batch_type))
    names = registered_name(type(config.objective)), registered_name(type(config.data))
    advice = f"set data.type to {DATA_TYPES.get(expected, 'another type')}"
    return (
        f"data.type: the objective '{names[0]}' trains on {needs}, but '{names[1]}' yields {yields}; {advice} [TM783]"
    )


def check_editor_path(config: RunConfig, world_size: int) -> str | None:
    model, process = config.model, config.process
    if not isinstance(model, DitSpec) or not model.edits or not isinstance(process, GaussianProcess):
        return None
    if isinstance(process.path, RectifiedFlow):
        return None
    name = registered_name(type(process.path))
    return (
        f"process.path.type: model.edits mixes the source into the velocity of a rectified flow, but the path is "
        f"'{name}'; set process.path.type to rectified_flow [TM2362]"
    )


def check_joint_batch(config: RunConfig, world_size: int) -> str | None:
    data = config.data
    if not isinstance(data, JointData) or config.batch.prompts % sum(data.counts) == 0:
        return None
    kinds = " + ".join(map(str, data.counts))
    return (
        f"batch.prompts: {config.batch.prompts} samples cannot be divided in the proportions {kinds} of the data; "
        f"set it to a multiple of {sum(data.counts)}"
        " [TM905]"
    )
