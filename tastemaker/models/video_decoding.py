"""Decode selected frames with the video VAEs of published generators, using as few latents as needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .video_backbone import DecodeFrames


def checkpoint_if(work: Callable[..., Any], recompute: bool, *given: Any) -> Any:
    """Call a function, with activation checkpointing if `recompute` is set and gradients are enabled."""
    again = recompute and torch.is_grad_enabled()
    return checkpoint(work, *given, use_reentrant=False) if again else work(*given)


def latents_needed(frames: Sequence[int], every: int) -> int:
    """How many latents it takes to show frames where the first is one frame and each other is `every` of them."""
    return 1 + -(-max(frames) // every)


def decode_whole_clip(net: Any, raw: Tensor, frames: Sequence[int]) -> Tensor:
    """Of a decoder that looks ahead: all of the clip."""
    shown: Tensor = net.decode(raw, return_dict=False)[0]
    return shown[:, :, list(frames)]


def wan_decoder(net: Any, recompute: bool) -> DecodeFrames:
    """Latent by latent, as published; none after the last that is asked for.

    What convolutions saw last goes along from latent to latent and is large. So latents are recomputed in groups, and
    in each of those one by one: it is kept for the groups and for the latents of one, twice the root of all.
    """
    decoder, slots = net.decoder, net._cached_conv_counts["decoder"]

    def single(latent: Tensor, first: bool, *before: Any) -> tuple[Any, ...]:
        held = list(before)  # the decoder replaces what is in it
        return decoder(latent, feat_cache=held, feat_idx=[0], first_chunk=first), *held

    def group(latents: Tensor, first: bool, *before: Any) -> tuple[Any, ...]:
        return along(single, latents, 1, first, before)

    def along(work: Any, latents: Tensor, size: int, first: bool, before: Sequence[Any]) -> tuple[Any, ...]:
        held, shown = list(before), []
        for i, part in enumerate(torch.split(latents, size, 2)):
            made, *held = checkpoint_if(work, recompute, part, first and i == 0, *held)
            shown.append(made)
        return torch.cat(shown, 2), *held

    def show(raw: Tensor, frames: Sequence[int]) -> Tensor:
        x = net.post_quant_conv(raw[:, :, : latents_needed(frames, 4)])
        pixels = along(group, x, math.isqrt(x.shape[2]), True, [None] * slots)[0][:, :, list(frames)]
        return _unfolded(pixels, net.config.patch_size or 1).clamp(-1, 1)

    return show


def _unfolded(x: Tensor, side: int) -> Tensor:
    """Squares of pixels that were kept as channels."""
    b, c, f, h, w = x.shape
    apart = x.view(b, c // side**2, side, side, f, h, w)
    return apart.permute(0, 1, 4, 5, 3, 6, 2).reshape(b, c // side**2, f, h * side, w * side)


def cogvideox_decoder(net: Any) -> DecodeFrames:
    """By twos, as published, the first with the odd one: norms are of each two, so they are not cut."""
    at_once = net.num_latent_frames_batch_size

    def show(raw: Tensor, frames: Sequence[int]) -> Tensor:
        needed = latents_needed(frames, 4)
        odd = raw.shape[2] % at_once
        count = odd + -(-(needed - odd) // at_once) * at_once
        return decode_whole_clip(net, raw[:, :, : max(count, odd + at_once)], frames)

    return show


def hunyuan_decoder(net: Any) -> DecodeFrames:
    """By tiles in time that overlap, as published, each fading in over the one before; those not seen are left out."""
    long, stride = net.tile_sample_min_num_frames, net.tile_sample_stride_num_frames
    every, fade = net.temporal_compression_ratio, long - stride

    def tile(raw: Tensor, number: int) -> Tensor:
        first = number * stride // every
        shown: Tensor = net.decoder(net.post_quant_conv(raw[:, :, first : first + long // every + 1]))
        return shown[:, :, 1:] if number else shown

    def frame(tiles: dict[int, Tensor], which: int) -> Tensor:
        number, place = owner(which)
        own = tiles[number][:, :, place]
        if number == 0 or place >= _faded(tiles, number, fade):
            return own
        extent = _faded(tiles, number, fade)
        before = tiles[number - 1][:, :, place - extent]
        return before * (1 - place / extent) + own * (place / extent)

    def owner(which: int) -> tuple[int, int]:
        """The tile that a frame is of, and its place there; the first has one frame more."""
        return (0, which) if which <= stride else ((which - 1) // stride, (which - 1) % stride)

    def show(raw: Tensor, frames: Sequence[int]) -> Tensor:
        if not net.use_framewise_decoding or raw.shape[2] <= long // every:
            return decode_whole_clip(net, raw, frames)
        owners = {owner(which) for which in frames}
        needed = {n for n, _ in owners} | {n - 1 for n, place in owners if n and place < fade}
        tiles = {n: tile(raw, n) for n in sorted(needed)}
        return torch.stack([frame(tiles, which) for which in frames], 2)

    return show


def _faded(tiles: dict[int, Tensor], number: int, fade: int) -> int:
    """Frames over which a tile fades in; a last one may be shorter."""
    return min(fade, tiles[number].shape[2])


def ltx_decoder(net: Any) -> DecodeFrames:
    """The whole clip, for the decoder looks ahead; later ones are told that nothing is left to denoise."""

    def show(raw: Tensor, frames: Sequence[int]) -> Tensor:
        level = raw.new_zeros(len(raw)) if net.config.timestep_conditioning else None
        shown: Tensor = net.decode(raw, level, return_dict=False)[0]
        return shown[:, :, list(frames)]

    return show


def mochi_decoder(net: Any) -> DecodeFrames:
    """The beginning alone: its decoder never looks ahead, and its norms are of each frame."""

    def show(raw: Tensor, frames: Sequence[int]) -> Tensor:
        return decode_whole_clip(net, raw[:, :, : latents_needed(frames, 6)], frames)

    return show


def svd_decoder(net: Any, at_once: int | None) -> DecodeFrames:
    """So many frames together as the decoder is to make fit each other, and only where one of them is asked for."""

    def together(raw: Tensor, first: int, count: int) -> Tensor:
        some = raw[:, :, first : first + count].transpose(1, 2)
        shown: Tensor = net.decode(some.flatten(0, 1), some.shape[1], return_dict=False)[0]
        return shown.view(*some.shape[:2], *shown.shape[1:])

    def show(raw: Tensor, frames: Sequence[int]) -> Tensor:
        count = at_once or raw.shape[2]
        parts = {n: together(raw, n * count, count) for n in sorted({frame // count for frame in frames})}
        return torch.stack([parts[frame // count][:, frame % count] for frame in frames], 2)

    return show
