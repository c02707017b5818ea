"""Attacks by rewards: one that writes into its pixels, and ones that return what is no score."""

from __future__ import annotations

from .lab import Lab, attack, expect, read_metrics, train_arguments

MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from tastemaker import Reward, RewardCard, RewardSpec


@dataclass(frozen=True)
class Vandal(RewardSpec, Reward):
    batch_size: int = 64
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="any")

    def load(self, placement):
        return self

    def score(self, pixels, prompts, metadata):
        pixels.zero_()
        return pixels.mean((1, 2, 3, 4))


@dataclass(frozen=True)
class InferenceVandal(Vandal):
    def score(self, pixels, prompts, metadata):
        with torch.inference_mode():
            pixels[:, 0].clamp_(0.4, 0.6)
        return torch.zeros(len(pixels))


def vandal(images, prompts, **metadata):
    images.zero_()
    return images.mean((1, 2, 3))

def view_vandal(images, prompts, **metadata):
    images.view(-1)[:].fill_(1)
    return images.mean((1, 2, 3))

def numpy_vandal(images, prompts, **metadata):
    images.numpy()[...] = 0.5
    return images.mean((1, 2, 3))

def list_vandal(images, prompts, **metadata):
    prompts[:] = ["a blue"] * len(prompts)
    return images.mean((1, 2, 3))

def honest(images, prompts, **metadata):
    return images.mean((1, 2, 3)) * 0

def on_meta(images, prompts, **metadata):
    return torch.zeros(len(prompts), device="meta")

def complex_numbers(images, prompts, **metadata):
    return torch.ones(len(prompts), dtype=torch.complex64) * 1j

def list_of_complex(images, prompts, **metadata):
    return [1j] * len(prompts)

def not_finite(images, prompts, **metadata):
    return [float("nan")] * len(prompts)

def too_many(images, prompts, **metadata):
    return torch.zeros(len(prompts) + 1)

def wrong_shape(images, prompts, **metadata):
    return torch.zeros(len(prompts), 3)

def text(images, prompts, **metadata):
    return ["good"] * len(prompts)

def nothing(images, prompts, **metadata):
    return None

def huge(images, prompts, **metadata):
    return [10 ** 400] * len(prompts)

def sparse(images, prompts, **metadata):
    return torch.zeros(len(prompts)).to_sparse()

def raising(images, prompts, **metadata):
    raise RuntimeError("the scorer is gone")

def exiting(images, prompts, **metadata):
    raise SystemExit(0)
"""
VANDALS = ("Vandal", "InferenceVandal", "vandal", "view_vandal", "numpy_vandal", "list_vandal")
WRONG = (
    "on_meta", "complex_numbers", "list_of_complex", "not_finite", "too_many", "wrong_shape", "text", "nothing", "huge",
    "sparse", "raising", "exiting",
)  # fmt: skip


def train_with(lab: Lab, first: str, run: str) -> list[str]:
    rewards = f'rewards={{a: {{type: "strange:{first}"}}, z: {{type: brightness}}}}'
    return train_arguments(lab.folder, run, 2, rewards, every=1)


@attack(
    "rewards-that-write-pixels",
    "other rewards score the samples as they were generated, or the run says so",
    quick=True,
)
def write_pixels(lab: Lab) -> None:
    (lab.folder / "strange.py").write_text(MODULE)
    lab.run(*train_with(lab, "honest", "honest")).expect_success()
    expected = read_metrics(lab.folder / "honest")[0]["rewards/z"]
    for name in VANDALS[: lab.count(6, 1)]:
        with lab.attempt(name):
            result = lab.run(*train_with(lab, name, name))
            if result.code:
                result.expect_message()
                continue
            found = read_metrics(lab.folder / name)[0]["rewards/z"]
            expect(found == expected, f"the reward beside it scored {found:.4f} instead of {expected:.4f}")


@attack("rewards-that-are-no-scores", "exit code 1 or 2 with a message that names the reward")
def return_strange_scores(lab: Lab) -> None:
    (lab.folder / "strange.py").write_text(MODULE)
    for name in WRONG:
        with lab.attempt(name):
            lab.run(*train_with(lab, name, name)).expect_message()
