"""What a `type:` may name, kind by kind; the only list of everything there is. It imports none of it, nor torch."""

from __future__ import annotations

from ..core.registry import AUTOENCODERS as AUTOENCODERS
from ..core.registry import Registry

MODELS = Registry(
    "model",
    {
        "cogvideox": "tastemaker.models.cogvideox:CogVideoX",
        "dit": "tastemaker.models.dit:Dit",
        "flux": "tastemaker.models.flux:Flux",
        "flux_kontext": "tastemaker.models.flux_kontext:FluxKontext",
        "gpt": "tastemaker.models.gpt:Gpt",
        "hunyuanvideo": "tastemaker.models.hunyuanvideo:HunyuanVideo",
        "latent_dit": "tastemaker.models.latent_dit.model:LatentDit",
        "llamagen": "tastemaker.models.llamagen.model:Llamagen",
        "ltx": "tastemaker.models.ltx:Ltx",
        "maskgit": "tastemaker.models.maskgit:Maskgit",
        "mochi": "tastemaker.models.mochi:Mochi",
        "modelscope": "tastemaker.models.modelscope:Modelscope",
        "opensora": "tastemaker.models.opensora.model:OpenSora",
        "qwen_image": "tastemaker.models.qwen_image:QwenImage",
        "sd15": "tastemaker.models.sd15:Sd15",
        "sd3": "tastemaker.models.sd3:Sd3",
        "sdxl": "tastemaker.models.sdxl:Sdxl",
        "showo": "tastemaker.models.showo.model:Showo",
        "svd": "tastemaker.models.svd:Svd",
        "toy_flow": "tastemaker.models.toy:ToyFlow",
        "toy_causal": "tastemaker.models.toy:ToyCausal",
        "toy_masked": "tastemaker.models.toy:ToyMasked",
        "wan": "tastemaker.models.wan:Wan",
        "videocrafter": "tastemaker.models.videocrafter:Videocrafter",
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
        "straight": "tastemaker.processes.paths:RectifiedFlow",
        "variance_preserving": "tastemaker.processes.paths:VariancePreserving",
        "karras": "tastemaker.processes.karras:KarrasPath",
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
    },
)
OBJECTIVES = Registry(
    "objective",
    {
        "likelihood": "tastemaker.objectives.likelihood:Likelihood",
        "reward_gradient": "tastemaker.objectives.reward_gradient:RewardGradient",
        "srpo": "tastemaker.objectives.srpo:SRPO",
        "ddpo": "tastemaker.objectives.ddpo:DDPO",
        "grpo": "tastemaker.objectives.grpo:GRPO",
        "forced_grpo": "tastemaker.objectives.forced_grpo:TeacherForcedGRPO",
        "dpo": "tastemaker.objectives.dpo:DPO",
        "cca": "tastemaker.objectives.cca:CCA",
        "online_dpo": "tastemaker.objectives.online_dpo:OnlineDPO",
        "nft": "tastemaker.objectives.nft:NFT",
    },
)
REWARDS = Registry(
    "reward",
    {
        "jpeg": "tastemaker.rewards.jpeg:Jpeg",
        "compression": "tastemaker.rewards.compression:Compression",
        "brightness": "tastemaker.rewards.color:Brightness",
        "color": "tastemaker.rewards.color:Color",
        "mse": "tastemaker.rewards.target_image:Mse",
        "l1": "tastemaker.rewards.target_image:L1",
        "lpips": "tastemaker.rewards.lpips:Lpips",
        "critic": "tastemaker.rewards.discriminator:DiscriminatorReward",
        "aesthetic": "tastemaker.rewards.aesthetic:Aesthetic",
        "weather": "tastemaker.rewards.weather:Weather",
        "classifier": "tastemaker.rewards.classifier:Classifier",
        "compression_score": "tastemaker.rewards.compression_score:CompressionScore",
        "detection": "tastemaker.rewards.detection:DetectionReward",
        "geneval": "tastemaker.rewards.geneval:Geneval",
        "ocr": "tastemaker.rewards.ocr:Ocr",
        "ocr_gradient": "tastemaker.rewards.ocr_gradient:OcrGradient",
        "hps": "tastemaker.rewards.hps:Hps",
        "pickscore": "tastemaker.rewards.pickscore:PickScore",
        "clip": "tastemaker.rewards.clip:ClipReward",
        "imagereward": "tastemaker.rewards.imagereward:ImageReward",
        "stillness": "tastemaker.rewards.stillness:Stillness",
        "dynamics": "tastemaker.rewards.dynamics:DynamicsReward",
        "flicker": "tastemaker.rewards.flicker:Flicker",
        "actpred": "tastemaker.rewards.actpred:Actpred",
        "vjepa": "tastemaker.rewards.vjepa:Vjepa",
        "vlm": "tastemaker.rewards.vlm:Vlm",
        "playground_verdict": "tastemaker.rewards.playground_verdict:PlaygroundVerdict",
        "playground_soft": "tastemaker.rewards.playground_soft:PlaygroundSoft",
        "playground_match": "tastemaker.rewards.playground_match:PlaygroundMatch",
        "playground_judge": "tastemaker.rewards.playground_judge:PlaygroundJudge",
        "playground_taste": "tastemaker.rewards.playground_taste:PlaygroundTaste",
        "playground_motion": "tastemaker.rewards.playground_motion:PlaygroundMotion",
        "playground_content": "tastemaker.rewards.playground_motion:PlaygroundContent",
        "relative": "tastemaker.rewards.combinators:Relative",
        "clipped": "tastemaker.rewards.combinators:Clipped",
        "per_frame": "tastemaker.rewards.combinators:PerFrame",
        "shuffled": "tastemaker.rewards.shuffled:Shuffled",
        "cached": "tastemaker.rewards.cached:Cached",
        "sum": "tastemaker.rewards.sum:Sum",
        "remote": "tastemaker.rewards.remote:Remote",
    },
    # What VADER calls them; its sum of two is (aesthetic + 15 hps) / 2, both of pictures stretched to a square.
    aliases={
        "pick_score": {"type": "pickscore"},
        "objectDetection": {"type": "detection", "want": "absent"},
        "rainy": {"type": "weather", "kind": "rainy"},
        "snowy": {"type": "weather", "kind": "snowy"},
        "aesthetic_hps": {
            "type": "sum",
            "of": [{"type": "aesthetic"}, {"type": "hps", "fit": "stretch"}],
            "weights": [0.5, 7.5],
        },
    },
)
TUNINGS = Registry(
    "tuning",
    {
        "full": "tastemaker.core.weights:FullFinetuning",
        "twin": "tastemaker.core.weights:FrozenCopyFinetuning",
        "lora": "tastemaker.core.lora:Lora",
    },
)
DATA = Registry(
    "data",
    {
        "prompts": "tastemaker.data.prompts:InlinePrompts",
        "prompt_file": "tastemaker.data.prompts:PromptFile",
        "prompt_set": "tastemaker.data.prompt_sets:PromptSet",
        "class_prompts": "tastemaker.data.class_prompts:ClassPrompts",
        "edit_file": "tastemaker.data.edits:EditFile",
        "illustrated_prompts": "tastemaker.data.prompt_images:IllustratedPrompts",
        "toy_pictures": "tastemaker.data.captioned_images:ToyPictures",
        "cifar10": "tastemaker.data.cifar10:Cifar10",
        "gallery": "tastemaker.data.images:Gallery",
        "picture_folder": "tastemaker.data.captioned_images:PictureFolder",
        "class_pictures": "tastemaker.data.class_images:ClassPictures",
        "code_folder": "tastemaker.data.tokens:CodeFolder",
        "latent_folder": "tastemaker.data.latents:LatentFolder",
        "toy_pairs": "tastemaker.data.pairs:ToyPairs",
        "pair_file": "tastemaker.data.pairs:PairFile",
        "pair_folder": "tastemaker.data.pairs:PairFolder",
        "toy_answers": "tastemaker.data.vqa:ToyAnswers",
        "answer_file": "tastemaker.data.vqa:AnswerFile",
        "playground_scenes": "tastemaker.data.playground:PlaygroundScenes",
        "playground_prompts": "tastemaker.data.playground:PlaygroundPrompts",
        "playground_signs": "tastemaker.data.playground:PlaygroundSigns",
        "playground_words": "tastemaker.data.playground:PlaygroundWords",
    },
)
SEARCHES = Registry(
    "search",
    {
        "single": "tastemaker.search.single:SingleSample",
        "scheduled": "tastemaker.search.diffusers_scheduler:DiffusersSchedulerSearch",
        "best_of_n": "tastemaker.search.best_of_n:BestOfN",
        "prm": "tastemaker.search.prm:PRMSearch",
        "parm": "tastemaker.search.parm:PARMSearch",
        "published_parm": "tastemaker.search.published_parm:PublishedPARMSearch",
        "refine": "tastemaker.search.refine:Refine",
    },
)
