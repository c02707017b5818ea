"""Every page for users of another system has a table of commands, and our command of each row runs at tiny size.

Commands that start several processes are not run here: their settings are checked, and so are their options.
`download` only lists what it would download.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from click import Context
from docs_pages import ROOT, command_table, heading_anchors, read_section
from tiny_commands import SMALL_BATCH, SMALL_RUN
from typer.main import get_command
from vlm_stubs import save_paligemma

from tastemaker.cli import app
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import RunConfig
from tastemaker.data.image_io import save_image

PAGES = [
    "migrate-image-cot.md",
    "migrate-llamagen-grpo.md",
    "migrate-nanovla.md",
    "migrate-srpo.md",
    "migrate-vader.md",
]
LAST_HEADING = "What differs on purpose"
COMMANDS = vars(get_command(app))["commands"]
# How a command starts that is not run, and why.
NOT_RUN = {"torchrun ": "starts several processes; tests of ranks do"}
# Values that replace those of the page, and options that are added: an empty value for a flag.
SMALL_VALUES = {"--count": "1", "--num-candidates": "2", "--num-inference-steps": "2", "--max-tokens": "4"}
SMALL_VALUES |= {"--device": "cpu", "--size": "32", "--fsdp-shards": "2"}
CPU = {"--device": "cpu"}
ADDED_OPTIONS: dict[str, dict[str, str]] = {
    "ask": CPU,
    "download": {"--list": ""},
    "embed": {"--tiny": "", "--precision": "fp32", **CPU},
    "encode": {"--size": "32", **CPU},
    "evaluate": {"--tiny": "", "--num-prompts": "2", "--count": "1", "--skip-self-test": "", **CPU},
    "generate": CPU,
    "rank": {"--tiny": "", "--count": "2", "--limit": "2", **CPU},
    "reconstruct": CPU,
    "train": CPU,
}
SMALL_GROUPS = ("objective.group_size=2",)
FEW_STEPS = ("process.num_steps=4",)
FP32 = "engine.precision=fp32"  # CPUs without bf16 emulate it
SMALL_RECIPES = {  # by the start of the name, where the published numbers take long, even with tiny networks
    "ar-grpo": SMALL_GROUPS,
    "dpo-iter-": (*FEW_STEPS, *SMALL_GROUPS),
    "dpo-parm-": FEW_STEPS,
    "dpo-showo": FEW_STEPS,
    "gcpo": SMALL_GROUPS,
    "grpo-llamagen": SMALL_GROUPS,
    "llamagen-vq": ("data.image_size=32", "validation.num_samples=2", "sample.every=0"),
    "srpo-": (*FEW_STEPS, "engine.param_dtype=fp32"),
    "scripts/dpo.yaml": FEW_STEPS,
    "va-pi": SMALL_GROUPS,
    "vader-": ("process.num_steps=2", "batch.prompts=1"),
}
ITERATIVE = ("config.yaml", "configs/celebhq.yaml", "dpo-showo", "srpo-", "vader-")  # four steps make a sample
# Their batch sizes are what is to be shown, or follow from the data.
AS_PUBLISHED = {"grpo-llamagen-tf-quickstart", "configs/showo_pretraining_stage2.yaml", "showo-joint"}
AUTOENCODER = """{z_channels: 4, down_channels: [32, 32], mid_channels: [32], down_sample: [true], attn_down: [false],
  norm_channels: 32, num_heads: 4, num_down_layers: 1, num_mid_layers: 1, num_up_layers: 1}"""
NANOVLA_FILES = {  # at tiny size
    "datasets": "celebhq: {type: image_folder, path: data/CelebAMask-HQ, im_size: 32, im_channels: 3}",
    "base": "train: {seed: 1111, batch_size: 2, lr: 0.00001, epochs: 1, save_every: 100, perceptual_weight: 0}",
    "vae": f"""
extends: base
dataset: celebhq
model: {{name: vae, params: {AUTOENCODER}}}
train: {{output_dir: outputs/vae}}
""",
    "dit": """
extends: base
dataset: celebhq
model: {name: dit, params: {hidden_size: 32, num_heads: 2, head_dim: 16, num_layers: 1}}
autoencoder: {z_channels: 4, down_sample: [true], weights: outputs/vae}
train: {output_dir: outputs/dit}
""",
    "celebhq": f"""
dataset_params: {{im_path: data/CelebAMask-HQ, im_size: 32, im_channels: 3}}
diffusion_params: {{num_timesteps: 1000, beta_start: 0.0001, beta_end: 0.02}}
dit_params: {{patch_size: 2, num_layers: 1, hidden_size: 32, ff_hidden_dim: 48, num_heads: 2, head_dim: 16,
  timestep_emb_dim: 16}}
autoencoder_params: {AUTOENCODER}
train_params: {{seed: 5, task_name: celebhq, autoencoder_batch_size: 2, autoencoder_epochs: 1, perceptual_weight: 0,
  dit_batch_size: 2, dit_epochs: 1, vae_latent_dir_name: vae_latents}}
""",
}
SHOWO_MODEL = """
    vq_model: {type: magvitv2, vq_model_name: showlab/magvitv2}
    showo: {load_from_showo: true, pretrained_model_path: showlab/show-o, w_clip_vit: false, vocab_size: 58498,
      llm_vocab_size: 50295, llm_model_path: microsoft/phi-1_5, codebook_size: 8192, num_vq_tokens: 256,
      num_new_special_tokens: 10}"""
SHOWO_OPTIMIZER = """
optimizer: {name: adamw, params: {learning_rate: 1e-5, beta1: 0.9, beta2: 0.999, weight_decay: 0.01, epsilon: 1e-8}}
lr_scheduler: {scheduler: cosine, params: {learning_rate: "${optimizer.params.learning_rate}", warmup_steps: 0}}"""
SHOWO_FILES = {  # of Image-Generation-CoT and Show-o
    "config.yaml": f"""
experiment: {{project: demo, name: show-o-demo, output_dir: show-o-demo}}
model: {SHOWO_MODEL}
dataset: {{gen_type: t2i, preprocessing: {{max_seq_length: 128, resolution: 256}}}}
training: {{cond_dropout_prob: 0.1, batch_size: 20, guidance_scale: 1.75, generation_timesteps: 18}}
""",
    "scripts/dpo.yaml": f"""
experiment: {{project: training, name: show-o-dpo, output_dir: outputs/dpo, save_every: 10000}}
model: {SHOWO_MODEL}
    rw_model: ckpts/parm
{SHOWO_OPTIMIZER}
dataset: {{params: {{data_path: dpo.jsonl}}, preprocessing: {{max_seq_length: 128, resolution: 256}}}}
training: {{batch_size_t2i: 10, mixed_precision: bf16, seed: 10086, max_grad_norm: null, beta: 0.1, reward_coef: 0.1,
  dpo_coef: 1, sft_coef: 0, num_epoch: 1}}
""",
    "configs/showo_pretraining_stage2.yaml": f"""
experiment: {{name: stage2, output_dir: outputs/stage2, save_every: 10000}}
model: {SHOWO_MODEL}
{SHOWO_OPTIMIZER}
dataset:
    params: {{train_t2i_shards_path_or_url: pictures, train_lm_shards_path_or_url: prompts.txt,
      train_mmu_shards_path_or_url: orm.json}}
    preprocessing: {{max_seq_length: 128, resolution: 256}}
training: {{batch_size_t2i: 1, batch_size_lm: 1, batch_size_mmu: 1, mixed_precision: bf16, seed: 10086,
  max_train_steps: 500, t2i_coeff: 1.0, lm_coeff: 0.1, mmu_coeff: 1.0}}
""",
}


def write_inputs(folder: Path) -> None:
    """Write what users of the other systems have: prompts, images, pairs, questions and configurations."""
    prompts = ["a photo of a red cat", "a photo of a blue dog", "a photo of two birds"]
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    (folder / "photo.json").write_text(json.dumps(prompts[:1]), encoding="utf-8")
    (folder / "classes.txt").write_text("88\n207\n", encoding="utf-8")
    images = [f"imagenet/{name}/{i}.png" for name in ("n01440764", "n01443537") for i in range(4)]
    images += [f"{parent}/{i}.png" for parent in ("pictures", "data/CelebAMask-HQ/CelebA-HQ-img") for i in range(4)]
    for number, name in enumerate([*images, "test.jpg"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_image(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(number)), folder / name)
    for i in range(4):
        (folder / f"pictures/{i}.txt").write_text(prompts[i % 3], encoding="utf-8")
    pictures = [f"pictures/{i}.png" for i in range(4)]
    pairs = [{"prompt": prompts[i % 3], "chosen": pictures[i], "rejected": pictures[3 - i]} for i in range(4)]
    for name in ("dpo.jsonl", "dpo_iter.jsonl"):
        (folder / name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    captioned = [{"prompt": prompts[i % 3], "image": pictures[i]} for i in range(4)]
    (folder / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in captioned), encoding="utf-8")
    answers = [
        {
            "id": str(i),
            "image": picture,
            "conversations": [
                {"from": "human", "value": "<image>\nIs this a red cat?"},
                {"from": "gpt", "value": ("yes", "no")[i % 2]},
            ],
        }
        for i, picture in enumerate(pictures)
    ]
    for name in ("orm.json", "parm.json"):
        (folder / name).write_text(json.dumps(answers), encoding="utf-8")
    for name, text in ({f"configs/{name}.yaml": text for name, text in NANOVLA_FILES.items()} | SHOWO_FILES).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def split_command(line: str) -> tuple[str, list[str]]:
    words = shlex.split(line)
    command, *arguments = words[words.index("tastemaker") + 1 :]
    return command, arguments


def parse(line: str) -> dict[str, Any]:
    """The parameters of a command line, converted to their types; a mistake is an error."""
    command, arguments = split_command(line)
    context: Context = COMMANDS[command].make_context(command, arguments)
    return context.params


def find_config(line: str) -> tuple[str, list[str]] | None:
    """Recipe or file of a command, and its overrides; None if the command has none. A run counts as its recipe."""
    parameters = parse(line)
    if "overrides" not in parameters:
        return None
    source = parameters.get("recipe") or parameters.get("model")
    return (source.removeprefix("runs/"), list(parameters["overrides"] or ())) if source else None


def list_small_settings(recipe: str, overrides: list[str], steps: int) -> list[str]:
    """The settings that make a training short."""
    settings = [f"steps={steps}", FP32]
    chosen = [each for start, values in SMALL_RECIPES.items() if recipe.startswith(start) for each in values]
    if not isinstance(load_any_config(recipe, overrides), RunConfig):
        return [*settings, "batch_size=2", *chosen]
    settings += SMALL_RUN[:2]
    return settings if recipe in AS_PUBLISHED or is_small_file(recipe) else [*settings, *SMALL_BATCH, *chosen]


def is_small_file(name: str) -> bool:
    return name in {f"configs/{stem}.yaml" for stem in NANOVLA_FILES}


def make_small(line: str, steps: int) -> list[str]:
    """The arguments of a documented command, changed to take seconds on a CPU."""
    command, arguments = split_command(line)
    arguments = [SMALL_VALUES.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
    options, settings = dict(ADDED_OPTIONS.get(command, {})), []
    recipe, overrides = find_config(line) or ("", [])
    if command == "train":
        settings = list_small_settings(recipe, overrides, steps)
    if command in ("evaluate", "generate") and recipe.startswith(ITERATIVE):
        settings = ["sample.num_steps=4", FP32]
    if command in ("generate", "train") and not arguments[0].startswith("runs/") and not is_small_file(recipe):
        options["--tiny"] = ""
    added = [word for name, value in options.items() if name not in arguments for word in (name, value) if word]
    return [command, *arguments, *settings, *added]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the inputs of all pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_page_has_a_table_of_commands_and_ends_with_the_differences(page: str) -> None:
    path = ROOT / "docs" / page
    rows = command_table(path)
    assert len(rows) >= 10
    assert [theirs for theirs, ours in rows if not re.match(r"(torchrun .* -m )?tastemaker ", ours)] == []
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[-1] == LAST_HEADING and headings.count(LAST_HEADING) == 1
    assert "commands" in heading_anchors(path)
    assert read_section(path, LAST_HEADING).count("\n- ") + read_section(path, LAST_HEADING).count("\n| ") >= 5


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_table_parse(page: str, folder: Path) -> None:
    """Options and their values are valid, the recipe exists and takes the settings."""
    for _, ours in command_table(ROOT / "docs" / page):
        source = find_config(ours)
        if source:
            load_any_config(*source)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:--tiny. :UserWarning")
# PaliGemma's processor calls a deprecated numpy interface.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_table_run(page: str, folder: Path) -> None:
    if page == "migrate-nanovla.md":
        save_paligemma(folder / "weights/paligemma-3b-pt-224")
    num_trainings: Counter[str] = Counter()  # of each run: a command that occurs again continues it
    failed = []
    for _, ours in command_table(ROOT / "docs" / page):
        recipe, overrides = find_config(ours) or ("", [])
        run = " ".join([recipe, *(each for each in overrides if each.startswith("name="))])
        num_trainings[run] += split_command(ours)[0] == "train"
        arguments = make_small(ours, num_trainings[run])
        if ours.startswith(tuple(NOT_RUN)):
            arguments = ["check", recipe, *overrides]
        if run_cli(*arguments):
            failed.append(ours)
    assert not failed
