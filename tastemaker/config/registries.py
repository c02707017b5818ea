"""The names that a `type:` may have, kind by kind, and hooks for the formats of other projects.

Classes and functions are named as "module:attribute" and imported when they are used, so that this module is light.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.registry import AUTOENCODERS as AUTOENCODERS
from ..core.registry import Registry

MODELS = Registry(
    "model",
    {
        "cogvideox": "tastemaker.models.cogvideox:CogVideoXSpec",
        "dit": "tastemaker.models.dit:DitSpec",
        "flux": "tastemaker.models.flux:FluxSpec",
        "flux2": "tastemaker.models.flux2:Flux2Spec",
        "flux_kontext": "tastemaker.models.flux_kontext:FluxKontextSpec",
        "gpt": "tastemaker.models.gpt:GptSpec",
        "hunyuanvideo": "tastemaker.models.hunyuanvideo:HunyuanVideoSpec",
        "hunyuanvideo15": "tastemaker.models.hunyuanvideo15:HunyuanVideo15Spec",
        "janus": "tastemaker.models.janus.model:JanusSpec",
        "latent_dit": "tastemaker.models.latent_dit.model:LatentDitSpec",
        "llamagen": "tastemaker.models.llamagen.model:LlamagenSpec",
        "ltx": "tastemaker.models.ltx:LtxSpec",
        "ltx2": "tastemaker.models.ltx2:Ltx2Spec",
        "maskgit": "tastemaker.models.maskgit:MaskgitSpec",
        "mochi": "tastemaker.models.mochi:MochiSpec",
        "modelscope": "tastemaker.models.modelscope:ModelscopeSpec",
        "opensora": "tastemaker.models.opensora.model:OpenSoraSpec",
        "qwen_image": "tastemaker.models.qwen_image:QwenImageSpec",
        "qwen_image_21": "tastemaker.models.qwen_image_21:QwenImage21Spec",
        "qwen_image_edit": "tastemaker.models.qwen_image_edit:QwenImageEditSpec",
        "sana": "tastemaker.models.sana:SanaSpec",
        "sana_sprint": "tastemaker.models.sana:SanaSprintSpec",
        "sd15": "tastemaker.models.sd15:Sd15Spec",
        "sd3": "tastemaker.models.sd3:Sd3Spec",
        "sdxl": "tastemaker.models.sdxl:SdxlSpec",
        "showo": "tastemaker.models.showo.model:ShowoSpec",
        "svd": "tastemaker.models.svd:SvdSpec",
        "toy_flow": "tastemaker.models.toy:ToyFlowSpec",
        "toy_causal": "tastemaker.models.toy:ToyCausalSpec",
        "toy_masked": "tastemaker.models.toy:ToyMaskedSpec",
        "wan": "tastemaker.models.wan:WanSpec",
        "wan_i2v": "tastemaker.models.wan_i2v:WanI2VSpec",
        "videocrafter": "tastemaker.models.videocrafter:VideocrafterSpec",
        "z_image": "tastemaker.models.z_image:ZImageSpec",
    },
)
PROCESSES = Registry(
    "process",
    {
        "gaussian": "tastemaker.processes.gaussian:GaussianProcess",
        "autoregressive": "tastemaker.processes.autoregressive:AutoregressiveProcess",
        "masked": "tastemaker.processes.masked:MaskedProcess",
    },
)
PATHS = Registry(
    "path",
    {
        "rectified_flow": "tastemaker.processes.paths:RectifiedFlow",
        "variance_preserving": "tastemaker.processes.paths:VariancePreserving",
        "karras": "tastemaker.processes.paths:KarrasPath",
        "trigflow": "tastemaker.processes.paths:TrigFlow",
    },
)
DYNAMICS = Registry(
    "dynamics",
    {
        "ode": "tastemaker.processes.dynamics:ODE",
        "ddim": "tastemaker.processes.dynamics:DDIM",
        "flow_sde": "tastemaker.processes.dynamics:FlowSDE",
        "dance_sde": "tastemaker.processes.dynamics:DanceSDE",
        "cps": "tastemaker.processes.dynamics:CPS",
        "consistency": "tastemaker.processes.dynamics:ConsistencySampling",
    },
)
OBJECTIVES = Registry(
    "objective",
    {
        "likelihood": "tastemaker.objectives.likelihood:Likelihood",
        "joint_likelihood": "tastemaker.objectives.joint_likelihood:JointLikelihood",
        "reward_gradient": "tastemaker.objectives.reward_gradient:RewardGradient",
        "srpo": "tastemaker.objectives.srpo:SRPO",
        "ddpo": "tastemaker.objectives.ddpo:DDPO",
        "grpo": "tastemaker.objectives.grpo:GRPO",
        "elbo_grpo": "tastemaker.objectives.elbo_grpo:ElboGRPO",
        "teacher_forced_grpo": "tastemaker.objectives.teacher_forced_grpo:TeacherForcedGRPO",
        "dpo": "tastemaker.objectives.dpo:DPO",
        "cca": "tastemaker.objectives.cca:CCA",
        "online_dpo": "tastemaker.objectives.online_dpo:OnlineDPO",
        "nft": "tastemaker.objectives.nft:NFT",
        "ram": "tastemaker.objectives.ram:RAM",
        "dgpo": "tastemaker.objectives.dgpo:DGPO",
        "crd": "tastemaker.objectives.crd:CRD",
        "kto": "tastemaker.objectives.kto:KTO",
        "online_kto": "tastemaker.objectives.kto:OnlineKTO",
        "mapo": "tastemaker.objectives.mapo:MaPO",
        "online_mapo": "tastemaker.objectives.mapo:OnlineMaPO",
        "distill": "tastemaker.objectives.distill:Distillation",
    },
)
REWARDS = Registry(
    "reward",
    {
        "jpeg": "tastemaker.rewards.compression:JpegReward",
        "compression": "tastemaker.rewards.compression:CompressionReward",
        "brightness": "tastemaker.rewards.color:BrightnessReward",
        "color": "tastemaker.rewards.color:ColorReward",
        "mse": "tastemaker.rewards.target_image:MseReward",
        "l1": "tastemaker.rewards.target_image:L1Reward",
        "lpips": "tastemaker.rewards.target_image:LpipsReward",
        "dino_similarity": "tastemaker.rewards.image_similarity:DinoSimilarityReward",
        "clip_i": "tastemaker.rewards.image_similarity:ClipImageSimilarityReward",
        "source_similarity": "tastemaker.rewards.source_similarity:SourceSimilarityReward",
        "discriminator": "tastemaker.rewards.discriminator:DiscriminatorReward",
        "aesthetic": "tastemaker.rewards.clip_heads:AestheticReward",
        "aesthetic_v25": "tastemaker.rewards.aesthetic_v25:AestheticV25Reward",
        "deqa": "tastemaker.rewards.quality_levels:DeqaReward",
        "qalign": "tastemaker.rewards.quality_levels:QalignReward",
        "musiq": "tastemaker.rewards.musiq:MusiqReward",
        "weather": "tastemaker.rewards.clip_heads:WeatherReward",
        "classifier": "tastemaker.rewards.classifier:ClassifierReward",
        "compression_score": "tastemaker.rewards.clip_heads:CompressionScoreReward",
        "function": "tastemaker.rewards.function:FunctionReward",
        "detection": "tastemaker.rewards.detection:DetectionReward",
        "geneval": "tastemaker.rewards.geneval:GenevalReward",
        "ocr": "tastemaker.rewards.ocr:OcrReward",
        "ocr_gradient": "tastemaker.rewards.ocr_gradient:OcrGradientReward",
        "hps": "tastemaker.rewards.hps:HpsReward",
        "hpsv3": "tastemaker.rewards.hpsv3:Hpsv3Reward",
        "pickscore": "tastemaker.rewards.pickscore:PickScoreReward",
        "clip": "tastemaker.rewards.clip:ClipReward",
        "clip_iqa": "tastemaker.rewards.clip_iqa:ClipIqaReward",
        "imagereward": "tastemaker.rewards.imagereward:ImageReward",
        "stillness": "tastemaker.rewards.motion:StillnessReward",
        "dynamics": "tastemaker.rewards.motion:DynamicsReward",
        "flicker": "tastemaker.rewards.motion:FlickerReward",
        "actpred": "tastemaker.rewards.actpred:ActionReward",
        "vjepa": "tastemaker.rewards.vjepa:VjepaReward",
        "video_align": "tastemaker.rewards.video_align:VideoAlignReward",
        "edit_reward": "tastemaker.rewards.edit_reward:EditRewardReward",
        "vlm": "tastemaker.rewards.vlm:VlmReward",
        "vlm_pair": "tastemaker.rewards.vlm:VlmPairReward",
        "openai_judge": "tastemaker.rewards.openai_judge:OpenaiJudgeReward",
        "win_rate": "tastemaker.rewards.group:WinRateReward",
        "rank": "tastemaker.rewards.group:RankReward",
        "group_diversity": "tastemaker.rewards.group:GroupDiversityReward",
        "preference": "tastemaker.rewards.preference:PreferenceReward",
        "playground_verdict": "tastemaker.rewards.playground:PlaygroundVerdictReward",
        "playground_edit": "tastemaker.rewards.playground_edit:PlaygroundEditReward",
        "playground_soft": "tastemaker.rewards.playground:PlaygroundSoftReward",
        "playground_match": "tastemaker.rewards.playground:PlaygroundMatchReward",
        "playground_judge": "tastemaker.rewards.playground:PlaygroundJudgeReward",
        "playground_taste": "tastemaker.rewards.playground:PlaygroundTasteReward",
        "playground_motion": "tastemaker.rewards.playground:PlaygroundMotionReward",
        "playground_content": "tastemaker.rewards.playground:PlaygroundContentReward",
        "relative": "tastemaker.rewards.wrappers:RelativeReward",
        "clipped": "tastemaker.rewards.wrappers:ClippedReward",
        "stepped": "tastemaker.rewards.wrappers:SteppedReward",
        "per_frame": "tastemaker.rewards.wrappers:PerFrameReward",
        "shuffled": "tastemaker.rewards.wrappers:ShuffledReward",
        "cached": "tastemaker.rewards.cached:CachedReward",
        "sum": "tastemaker.rewards.wrappers:SumReward",
        "remote": "tastemaker.rewards.remote:RemoteReward",
    },
)
TUNINGS = Registry(
    "tuning",
    {
        "full": "tastemaker.core.weights:FullFinetuning",
        "frozen_copy": "tastemaker.core.weights:FrozenCopyFinetuning",
        "lora": "tastemaker.core.lora:Lora",
    },
)
DATA = Registry(
    "data",
    {
        "prompts": "tastemaker.data.prompts:InlinePrompts",
        "prompt_file": "tastemaker.data.prompts:PromptFile",
        "prompt_set": "tastemaker.data.prompts:PromptSet",
        "class_prompts": "tastemaker.data.prompts:ClassPrompts",
        "edit_file": "tastemaker.data.edits:EditFile",
        "prompts_with_images": "tastemaker.data.prompt_images:PromptsWithImages",
        "toy_images": "tastemaker.data.toy:ToyImages",
        "cifar10": "tastemaker.data.cifar10:Cifar10",
        "image_collection": "tastemaker.data.images:ImageCollection",
        "captioned_folder": "tastemaker.data.images:CaptionedFolder",
        "class_images": "tastemaker.data.images:ClassImages",
        "token_folder": "tastemaker.data.tokens:TokenFolder",
        "latent_folder": "tastemaker.data.latents:LatentFolder",
        "toy_pairs": "tastemaker.data.toy:ToyPairs",
        "pair_file": "tastemaker.data.pairs:PairFile",
        "pair_folder": "tastemaker.data.pairs:PairFolder",
        "votes": "tastemaker.data.votes:VoteData",
        "like_votes": "tastemaker.data.votes:LikeVotes",
        "like_file": "tastemaker.data.likes:LikeFile",
        "like_folder": "tastemaker.data.likes:LikeFolder",
        "toy_likes": "tastemaker.data.toy:ToyLikes",
        "toy_vqa": "tastemaker.data.toy:ToyVqa",
        "vqa_file": "tastemaker.data.vqa:VqaFile",
        "joint": "tastemaker.data.joint:JointData",
        "playground_scenes": "tastemaker.data.playground:PlaygroundScenes",
        "playground_prompts": "tastemaker.data.playground:PlaygroundPrompts",
        "playground_edits": "tastemaker.data.playground_edits:PlaygroundEdits",
        "playground_pairs": "tastemaker.data.playground_preferences:PlaygroundPairs",
        "playground_likes": "tastemaker.data.playground_preferences:PlaygroundLikes",
        "playground_signs": "tastemaker.data.playground:PlaygroundSigns",
        "playground_sign_prompts": "tastemaker.data.playground:PlaygroundSignPrompts",
    },
)
SEARCHES = Registry(
    "search",
    {
        "single": "tastemaker.search.best_of_n:SingleSample",
        "diffusers_scheduler": "tastemaker.search.diffusers_scheduler:DiffusersSchedulerSearch",
        "best_of_n": "tastemaker.search.best_of_n:BestOfN",
        "prm": "tastemaker.search.prm:PRMSearch",
        "parm": "tastemaker.search.parm:PARMSearch",
        "published_parm": "tastemaker.search.parm:PublishedPARMSearch",
        "refine": "tastemaker.search.refine:Refine",
        "fk_steering": "tastemaker.search.fk_steering:FKSteering",
        "noise_search": "tastemaker.search.noise_search:NoiseSearch",
        "reno": "tastemaker.search.reno:ReNO",
    },
)

# Hooks, which `tastemaker.compat` fills.

# Functions (config, overrides) -> (config in our keys, overrides left to apply), or None if the file is not of their
# format. The converted configuration may name a recipe that it `extends`.
CONFIG_FORMATS: list[str] = []

# Functions (entry, where) -> settings of `data`, by the `type` that an entry of datasets.yaml has in the other project.
DATASET_FORMATS: dict[str, str] = {}

# Advice for a value that another project has for a key, by (key, value).
VALUE_HINTS: dict[tuple[str, str], str] = {}


def convert_config(config: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Convert a file of another project to our keys; files in our own format are returned unchanged."""
    for name in CONFIG_FORMATS:
        converted = _import_function(name)(config, overrides)
        if converted is not None:
            result: tuple[dict[str, Any], list[str]] = converted
            return result
    return config, list(overrides)


def convert_dataset(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert one entry of datasets.yaml; `where` names it in messages."""
    name = DATASET_FORMATS.get(str(entry.get("type")))
    return dict(entry) if name is None else _import_function(name)(entry, where)


def _import_function(name: str) -> Any:
    module, _, function = name.partition(":")
    return vars(importlib.import_module(module))[function]
