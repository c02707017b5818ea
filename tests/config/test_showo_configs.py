"""OmegaConf YAML files of Image-Generation-CoT and Show-o, converted when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load
from tastemaker.config.schema import OptimConfig, RunConfig
from tastemaker.config.validate import validate_config
from tastemaker.core.registry import ConfigError
from tastemaker.data.joint import JointData
from tastemaker.data.pairs import PairFile
from tastemaker.models.showo.model import ShowoSpec
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.joint_likelihood import JointLikelihood
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.processes.masked import MaskedProcess
from tastemaker.rewards.vlm import VlmReward

MODEL = """
wandb: {entity: null, resume: 'auto'}
model:
    rw_model: "ckpts/parm"
    vq_model: {type: "magvitv2", vq_model_name: "showlab/magvitv2"}
    showo: {load_from_showo: False, pretrained_model_path: "ckpts/dpo", w_clip_vit: False, vocab_size: 58498,
        llm_vocab_size: 50295, llm_model_path: 'microsoft/phi-1_5', codebook_size: 8192, num_vq_tokens: 256,
        num_new_special_tokens: 10}
    gradient_checkpointing: True
"""
OPTIMIZER = """
optimizer:
    name: adamw
    params: {learning_rate: 1e-5, scale_lr: False, beta1: 0.9, beta2: 0.999, weight_decay: 0.01, epsilon: 1e-8}
"""
DPO_FILE = f"""{MODEL}{OPTIMIZER}
experiment: {{project: "training", name: "show-o-dpo", output_dir: "outputs/dpo", save_every: 10000, eval_every: 2500,
    generate_every: 1000, log_every: 1, log_grad_norm_every: 20}}
dataset:
    gen_type: "t2i"
    params: {{data_path: "pairs.yaml", validation_prompts_file: "validation_prompts/showoprompts.txt",
        shuffle_buffer_size: 1000, num_workers: 32, resolution: 256, pin_memory: True, persistent_workers: True}}
    preprocessing: {{max_seq_length: 128, resolution: 256, center_crop: False, random_flip: False}}
lr_scheduler:
    scheduler: "cosine"
    params: {{learning_rate: "${{optimizer.params.learning_rate}}", warmup_ratio: 0.1}}
training: {{gradient_accumulation_steps: 1, batch_size_t2i: 10, mixed_precision: "bf16", enable_tf32: True, seed: 10086,
    overfit_one_batch: False, cond_dropout_prob: 0.1, min_masking_rate: 0.0, label_smoothing: 0.0, max_grad_norm: null,
    guidance_scale: 0.0, generation_timesteps: 12, beta: 0.1, reward_coef: 0.1, dpo_coef: 1, sft_coef: 0, num_epoch: 2}}
inference: {{generation_timesteps: 18, guidance_scale: 1.75}}
"""
JOINT_FILE = f"""{MODEL.replace("ckpts/dpo", "showlab/show-o")}{OPTIMIZER}
experiment: {{name: "stage2", output_dir: "stage2", save_every: 10000, resume_from_checkpoint: latest}}
dataset:
    gen_type: "t2i"
    und_type: "captioning"
    combined_loader_mode: "max_size_cycle"
    params: {{train_t2i_shards_path_or_url: images, train_mmu_shards_path_or_url: ["/data/{{000..999}}.tar"],
        train_lm_shards_path_or_url: texts.txt, add_caption_prompt: True, num_workers: 32, resolution: 256}}
    preprocessing: {{max_seq_length: 128, resolution: 256, center_crop: False, random_flip: False}}
lr_scheduler: {{scheduler: cosine, params: {{warmup_steps: 5000}}}}
training: {{gradient_accumulation_steps: 2, noise_type: "mask", batch_size_t2i: 5, batch_size_lm: 1, batch_size_mmu: 2,
    mixed_precision: "bf16", seed: 10086, max_train_steps: 500, cond_dropout_prob: 0.1, max_grad_norm: 1,
    guidance_scale: 0.0, generation_timesteps: 12, t2i_coeff: 1.0, lm_coeff: 0.1, mmu_coeff: 0.5}}
"""
SAMPLING_FILE = """
experiment: {project: "demo", name: "show-o-demo", output_dir: "show-o-demo"}
model:
    vq_model: {type: "magvitv2", vq_model_name: "showlab/magvitv2"}
    showo: {pretrained_model_path: "showlab/show-o", w_clip_vit: False, vocab_size: 58498, llm_vocab_size: 50295,
        llm_model_path: 'microsoft/phi-1_5', codebook_size: 8192, num_vq_tokens: 256, num_new_special_tokens: 10}
    gradient_checkpointing: True
dataset:
    gen_type: "t2i"
    und_type: "captioning"
    params: {batch_size: "${training.batch_size}", shuffle_buffer_size: 1000, num_workers: 32, resolution: 256}
    preprocessing: {max_seq_length: 128, resolution: 256, center_crop: False, random_flip: False}
training: {gradient_accumulation_steps: 1, cond_dropout_prob: 0.1, batch_size: 20}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("a.png")
    rows = [json.dumps({"prompt": "a", "chosen": "a.png", "rejected": "a.png"})] * 25
    Path("pairs.jsonl").write_text("\n".join(rows))
    Path("pairs.yaml").write_text("datasets: [{json_path: pairs.jsonl, sampling_strategy: all}]")
    Path("images").mkdir()
    Path("texts.txt").write_text("a\nb\n")
    for name, text in (("dpo", DPO_FILE), ("joint", JOINT_FILE), ("config", SAMPLING_FILE)):
        Path(f"{name}.yaml").write_text(text)
    return tmp_path


def test_dpo_file_is_the_published_stage() -> None:
    config = load("dpo.yaml")
    assert isinstance(config, RunConfig) and validate_config(config_to_dict(config)) == config
    assert isinstance(config.model, ShowoSpec)
    assert (config.model.weights, config.model.likelihood_scope) == ("dpo", "sequence")  # there is no folder ckpts/dpo
    assert config.objective == DPO(beta=0.1, prompt_dropout=0.1, noise_sharing="independent", reward_guidance_coef=0.1)
    assert config.rewards["judge"].spec == VlmReward(weights="parm", question="guidance")
    assert config.data == PairFile(Path("pairs.yaml"), image_size=256)
    assert (config.batch.prompts, config.steps) == (10, 6)  # two epochs of 25 pairs
    assert config.optim == OptimConfig(1e-5, (0.9, 0.999), 1e-8, 0.01, 0.0, 1, "cosine")
    assert config.engine.precision == "bf16" and config.engine.activation_memory == "checkpoint"
    assert isinstance(config.process, MaskedProcess) and config.process.num_steps == 18
    assert config.guidance is not None and config.guidance.scale == 2.75
    assert (config.seed, config.output_dir, config.name) == (10086, Path("outputs"), "dpo")
    assert (config.checkpoint.every, config.sample.every) == (10000, 1000)
    Path("ckpts/dpo").mkdir(parents=True)
    assert load("dpo.yaml").model.weights == "ckpts/dpo"


def test_overrides_may_have_their_names_or_ours() -> None:
    config = load("dpo.yaml", ["training.reward_coef=0", "training.sft_coef=0.5", "optim.lr=2e-5", "model.weights=x"])
    assert isinstance(config.objective, DPO) and not config.rewards
    assert (config.objective.sft_coef, config.optim.lr, config.model.weights) == (0.5, 2e-5, "x")
    other = load("dpo.yaml", ["model.showo.pretrained_model_path=ckpts/dpo_iter", "training.num_epoch=4"])
    assert (other.model.weights, other.steps) == ("dpo_iter", 12)


def test_joint_file_has_three_losses() -> None:
    with (
        pytest.warns(UserWarning, match=r"load_from_showo.*TM912"),
        pytest.warns(UserWarning, match=r"train_mmu_shards_path_or_url.*data\.questions.*TM913"),
    ):
        config = load("joint.yaml")
    assert config.objective == JointLikelihood(1.0, 0.1, 0.5, 0.1)
    assert isinstance(config.data, JointData) and config.data.counts == (5, 1, 2)
    settings = config_to_dict(config)["data"]
    assert settings["images"] == {"type": "captioned_folder", "path": "images", "image_size": 256}
    assert settings["text"]["path"] == "texts.txt" and settings["questions"]["type"] == "toy_vqa"
    assert (config.batch.prompts, config.batch.micro_batch_size, config.steps) == (16, 8, 500)
    assert (config.optim.warmup_steps, config.optim.max_grad_norm) == (5000, 1)
    assert isinstance(config.process, MaskedProcess) and config.process.num_steps == 12
    t2i = JOINT_FILE.replace("batch_size_lm: 1, batch_size_mmu: 2,", "")
    Path("t2i.yaml").write_text(t2i)
    assert isinstance(load("t2i.yaml").objective, Likelihood)


def test_sampling_file_names_the_model() -> None:
    config = load("config.yaml", ["model.weights=dpo_iter"])
    assert isinstance(config.model, ShowoSpec) and config.model.weights == "dpo_iter"
    assert isinstance(config.process, MaskedProcess) and config.process.num_steps == 18  # main.py's
    assert config.guidance is not None and config.guidance.scale == 2.75


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.bta=1", r"'bta'.*'beta'.*TM909"),
        ("training.label_smoothing=0.1", r"training\.label_smoothing.*TM910"),
        ("training.dpo_coef=2", r"training\.dpo_coef.*TM910"),
        ("model.showo.num_vq_tokens=1024", r"model\.showo\.num_vq_tokens.*TM911"),
        ("lr_scheduler.scheduler=polynomial", r"lr_scheduler\.scheduler.*TM914"),
        ("optimizer.params=3", r"optimizer\.params.*TM908"),
        ("lr_scheduler.params.learning_rate='${optimizer.lr}'", r"lr_scheduler\.params\.learning_rate.*TM906"),
    ],
)
def test_wrong_settings_are_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load("dpo.yaml", [override])
    Path("more.yaml").write_text(DPO_FILE + "\nmoe: {enabled: true}")
    with pytest.raises(ConfigError, match=r"'moe'.*TM907"):
        load("more.yaml")
