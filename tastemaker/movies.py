"""Clips as H.264 in MP4; the one file that imports PyAV."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def write_movie(frames: NDArray[np.uint8], path: Path, frames_per_second: int) -> None:
    """Write frames [F, H, W, 3]; H.264 halves the colour planes, so an odd side repeats its last line."""
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(path, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=frames_per_second, options={"crf": "14"})
        stream.width, stream.height, stream.pix_fmt = even.shape[2], even.shape[1], "yuv420p"
        for frame in even:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        file.mux(stream.encode(None))


def read_movie(path: Path) -> NDArray[np.uint8]:
    """All frames: [F, H, W, 3]; none of them made up by the decoder, as it does where bytes are broken."""
    try:
        with av.open(path) as file:
            if not file.streams.video:
                raise ValueError("it holds no video")
            shown = [(frame.to_ndarray(format="rgb24"), frame.is_corrupt) for frame in file.decode(video=0)]
    except av.FFmpegError as error:  # some of which are no ValueError
        raise ValueError(str(error)) from error
    if not shown:
        raise ValueError("it holds no frames")
    broken = [place for place, (_, corrupt) in enumerate(shown) if corrupt]
    if broken:
        raise ValueError(f"its frame {broken[0]} is broken")
    return np.stack([frame for frame, _ in shown]).astype(np.uint8)
