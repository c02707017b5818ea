"""`tastemaker verify`: it matches what is equal, finds what differs, goes on after failures, and resumes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_runner import run_cli
from torch import Tensor

from tastemaker.config.dump import registered_name
from tastemaker.config.registries import MODELS, REWARDS
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.pretrained import silence_libraries
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.verification import models, rewards
from tastemaker.verification.local_weights import with_local_weights
from tastemaker.verification.references import (
    REFERENCES,
    STABLE_DIFFUSION,
    UNCOMPARED,
    build_pipeline_of,
    find_reference,
    load_pipeline_class,
    prepare_comparison,
)
from tastemaker.verification.report import Entry, Settings, combine_status, read_report, write_report
from tastemaker.verification.runner import Task, find_tasks, run_verification, verify_in_process, verify_task

TINY = Settings(tiny=True, device="cpu")
PNDM = {"_class_name": "PNDMScheduler", **STABLE_DIFFUSION, "steps_offset": 1, "skip_prk_steps": True}


def checks_of(entry: Entry) -> dict[str, str]:
    return {check.name: check.verdict for check in entry.checks}


def test_equal_samples_match_and_a_wrong_timestep_shift_is_found(tmp_path: Path) -> None:
    config = models.load_config("flux-schnell", TINY, tmp_path)
    comparison = prepare_comparison(
        config,
        find_reference("flux-schnell", "flux"),
        tmp_path / "pipeline",
        tiny=True,
        sampling_steps=2,
        placement=Placement(),
    )
    check = models.compare(comparison, models.TOLERANCES["tiny"])
    assert check.verdict == "pass" and 0 < check.values["latents_relative"] < 5e-5
    wrong = replace(comparison, process=replace(comparison.process, path=RectifiedFlow(shift=1.2)))
    assert models.compare(wrong, models.TOLERANCES["tiny"]).verdict == "fail"


def test_a_model_of_this_package_runs_with_doctor_and_training() -> None:
    entry = verify_task(Task("model", "toy-flow"), TINY)
    verdicts = checks_of(entry)
    assert (entry.status, entry.reason) == ("runs", "not compared: a network of this package")
    assert verdicts["training"] == verdicts["gradient of every trainable tensor"] == "pass" and len(verdicts) == 12
    assert entry.seconds > 0 and entry.device == "cpu" and set(entry.versions) >= {"torch", "diffusers", "tastemaker"}


@pytest.fixture
def broken_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of a user: one raises, and one draws random scores."""

    def fail(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
        raise IndexError("out of range")

    def guess(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
        return torch.rand(len(images))

    module = ModuleType("broken_rewards")
    vars(module).update(fail=fail, guess=guess)
    monkeypatch.setitem(sys.modules, "broken_rewards", module)


@pytest.mark.usefixtures("broken_rewards")
def test_failures_do_not_stop_the_others_and_a_second_call_keeps_what_passed(tmp_path: Path) -> None:
    failing, random = (f"{{type: function, function: 'broken_rewards:{name}'}}" for name in ("fail", "guess"))
    names, out = ["color", failing, random, '{type: hps, weights: "no/such"}', "ocr"], tmp_path / "verify.json"
    assert run_cli("verify", *names, "--tiny", "--device", "cpu", "--out", str(out)) == 1
    first = {entry.name: entry for entry in read_report(out).entries}
    assert [first[name].status for name in names] == ["matched", "failed", "failed", "runs", "runs"]
    assert "IndexError" in first[failing].reason and "repeated scores" in first[random].reason
    again = list(run_verification(find_tasks(names, everything=False), TINY, out, isolate=False))
    assert [known for _, known in again] == [True, False, False, True, True]
    (other,) = run_verification([Task("reward", "color")], replace(TINY, steps=3), out, isolate=False)
    assert not other[1]


def test_missing_weights_are_not_tried_and_the_command_is_named(tmp_path: Path) -> None:
    settings, out = replace(TINY, tiny=False), tmp_path / "verify.json"
    tasks = find_tasks(['{type: hps, weights: "no/such"}', "openai_judge", "brightness"], everything=False)
    hps, judge, brightness = (entry for entry, _ in run_verification(tasks, settings, out, isolate=False))
    assert (
        hps.status == judge.status == "not tried"
        and "no/such" in hps.reason
        and "`tastemaker download '{type: hps" in hps.reason
    )
    assert "endpoint" in judge.reason and brightness.status == "matched"


def test_names_mean_models_rewards_and_recipes() -> None:
    assert find_tasks(["flux", "models/wan22", "sd3"], everything=False) == [
        Task("model", "flux"),
        Task("model", "wan22"),
        Task("model", "sd3"),
    ]
    recipe = find_tasks(["grpo-toy-flow"], everything=False)
    assert recipe == [Task("model", "grpo-toy-flow"), Task("reward", "color")]
    everything = find_tasks([], everything=True)
    assert {task.name for task in everything if task.kind == "reward"} == set(REWARDS)
    kinds = {models.list_models()[task.name] for task in everything if task.kind == "model"}
    assert kinds == set(MODELS)
    for names, code in (["fluxx"], "TM2256"), ([], "TM2254"), (["vae-playground"], "TM2255"):
        with pytest.raises(ConfigError, match=code):
            find_tasks(names, everything=False)


def test_every_model_is_compared_or_says_why() -> None:
    silent = [
        name
        for name, kind in models.list_models().items()
        if kind not in UNCOMPARED and models.load_spec(name).layout is None
    ]
    assert not silent, "add these models to UNCOMPARED with the reason, or give their specs a layout"


def test_only_models_that_read_images_are_verified_with_edits(tmp_path: Path) -> None:
    readers = {name for name in models.list_models() if models.load_spec(name).reads_image}
    assert readers == {
        *("flux-kontext", "flux2", "flux2-klein", "flux2-klein-base", "qwen-image-edit", "playground-edit"),
        *("svd", "wan-i2v", "wan22-i2v", "wan22-ti2v"),
    }
    assert all(
        models.load_spec(name).reads_image
        for name in models.list_models()
        if models.load_spec(name).needs_initial_image
    )
    edited, generated = (models.load_config(name, TINY, tmp_path).data for name in ("flux2-klein", "qwen-image-21"))
    assert (registered_name(type(edited)), registered_name(type(generated))) == ("edit_file", "prompts")


def test_a_model_whose_pipeline_cannot_be_derived_is_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(REFERENCES, "svd")
    check = models.check_samples("svd", models.load_config("svd", TINY, tmp_path), TINY, tmp_path)
    assert check.verdict == "skip" and "feature_extractor" in check.reason
    assert combine_status([check], models.COMPARED) == ("runs", check.reason)


def test_other_files_and_formats_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "verify.json"
    for text, code in (("[1]", "TM2250"), ('{"entries": [], "format": 9}', "TM2251")):
        out.write_text(text)
        with pytest.raises(ConfigError, match=code):
            read_report(out)
    write_report(out, [Entry("b", "reward", "runs"), Entry("a", "reward", "matched")])
    assert [entry.name for entry in read_report(out).entries] == ["a", "b"]
    settings = replace(TINY, tiny=False, weights=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="TM2253"):
        models.model_sources("flux", settings)


@pytest.mark.slow
def test_a_published_folder_is_found_and_its_scheduler_is_converted(tmp_path: Path) -> None:
    """The path of published weights, with a small folder in their place: PNDM of the folder becomes DDIM."""
    reference = replace(find_reference("sd15", "sd15"), scheduler=PNDM)
    spec = models.load_spec("sd15")
    pipeline = build_pipeline_of(spec.tiny(), load_pipeline_class(spec.layout), reference)
    with silence_libraries():
        pipeline.save_pretrained(tmp_path / str(spec.weights))
    settings = replace(TINY, tiny=False, weights=str(tmp_path))
    config = models.load_config("sd15", settings, tmp_path, ["model.height=64", "model.width=64"])
    assert not models.model_sources("sd15", settings)
    config = replace(config, model=with_local_weights(config.model, settings.weights))
    check = models.check_samples("sd15", config, settings, tmp_path)
    assert check.verdict == "pass" and check.values["tolerance"] == 1e-3, check.reason
    assert check.values["latents_relative"] < 5e-5


@pytest.mark.slow
def test_a_process_that_dies_is_a_failure_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify_in_process(Task("reward", "brightness"), TINY).status == "matched"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.executable", "/bin/false")
    dead = verify_in_process(Task("reward", "brightness"), TINY)
    assert dead.status == "failed" and "code 1" in dead.reason


def test_an_editor_is_compared_with_two_sources_and_a_wrong_size_is_found(tmp_path: Path) -> None:
    config, reference = models.load_config("qwen-image-edit", TINY, tmp_path), find_reference("", "qwen_image_edit")
    options: dict[str, Any] = {"tiny": True, "sampling_steps": 2, "placement": Placement()}
    comparison = prepare_comparison(config, reference, tmp_path / "pipeline", **options)
    (metadata,) = comparison.metadata()
    assert [image.shape[2:] for image in metadata["image"]] == [(64, 64), (64, 32)]
    assert models.compare(comparison, models.TOLERANCES["tiny"]).verdict == "pass"
    module = sys.modules[type(comparison.pipeline).__module__]
    assert vars(module)["VAE_IMAGE_SIZE"] == 1024 * 1024  # as before the comparison
    smaller = replace(comparison, reference=replace(reference, constants=lambda spec: {"VAE_IMAGE_SIZE": 32 * 32}))
    assert models.compare(smaller, models.TOLERANCES["tiny"]).verdict == "fail"


@pytest.mark.slow
def test_sound_is_compared_beside_video(tmp_path: Path) -> None:
    config, reference = models.load_config("ltx2", TINY, tmp_path), find_reference("ltx2", "ltx2")
    options: dict[str, Any] = {"tiny": True, "sampling_steps": 2, "placement": Placement()}
    comparison = prepare_comparison(config, reference, tmp_path / "pipeline", **options)
    check = models.compare(comparison, models.TOLERANCES["tiny"])
    assert check.verdict == "pass" and 0 < check.values["latents_relative"] < 5e-5
    start, final, _ = comparison.sample_ours()
    published, _ = comparison.sample_reference(start)
    spec: Any = comparison.spec
    tokens = spec.video_tokens
    assert published is not None and published[:, tokens:].shape == final[:, tokens:].shape == (2, 9, 128)
    assert (published - start)[:, tokens:].abs().max() > 0.1  # the sound was denoised
    quiet = replace(reference, call={**reference.call, "audio_guidance_scale": 1.5})
    assert models.compare(replace(comparison, reference=quiet), models.TOLERANCES["tiny"]).verdict == "fail"


@pytest.mark.slow
def test_a_published_editor_needs_no_processor_of_videos(tmp_path: Path) -> None:
    """The path of published weights: the processor comes from files of the folder, without torchvision."""
    reference, spec = find_reference("", "qwen_image_edit"), models.load_spec("qwen-image-edit")
    pipeline = build_pipeline_of(spec.tiny(), load_pipeline_class(spec.layout), reference)
    index = tmp_path / str(spec.weights) / "model_index.json"
    with silence_libraries():
        pipeline.save_pretrained(index.parent)
    published = {**json.loads(index.read_text()), "processor": ["transformers", "Qwen2VLProcessor"]}
    index.write_text(json.dumps(published))
    settings = replace(TINY, tiny=False, weights=str(tmp_path))
    sizes = ["height=64", "width=64", "source_pixels=4096", "condition_pixels=4096", "max_text_tokens=1000"]
    config = models.load_config("qwen-image-edit", settings, tmp_path, [f"model.{size}" for size in sizes])
    config = replace(config, model=with_local_weights(config.model, settings.weights))
    check = models.check_samples("qwen-image-edit", config, settings, tmp_path, is_recipe=True)
    assert check.verdict == "pass" and check.values["latents_relative"] < 5e-5, check.reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sd15", "qwen-image", "qwen-image-21", "ltx", "svd", "wan-i2v", "hunyuanvideo15"])
def test_samples_of_other_families_match(name: str, tmp_path: Path) -> None:
    config = models.load_config(name, TINY, tmp_path)
    check = models.check_samples(name, config, TINY, tmp_path)
    assert check.verdict == "pass", check.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detection", "geneval", "ocr_gradient", "playground_motion", "vlm_pair"])
def test_rewards_get_what_they_need(name: str) -> None:
    entry = verify_task(Task("reward", name), TINY)
    assert entry.status == "runs", entry.reason


@pytest.mark.parametrize("name", ["source_similarity", "playground_edit"])
def test_rewards_of_edits_get_a_source_and_a_mask(name: str) -> None:
    entry = verify_task(Task("reward", name), TINY)
    assert entry.status == "runs", entry.reason
    assert checks_of(entry)["gradient"] in ("pass", "skip")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", find_tasks([], everything=True), ids=lambda task: f"{task.kind}-{task.name}")
def test_everything_matches_or_runs(task: Task) -> None:
    entry = verify_task(task, TINY)
    assert entry.status in ("matched", "runs"), entry.reason


@pytest.mark.long
def test_rewards_of_published_scores_exist() -> None:
    from tastemaker.verification.reference_scores import load_reference_scores

    assert {score.reward for score in load_reference_scores()} <= set(rewards.list_rewards())
