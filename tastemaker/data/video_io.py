"""Clips as H.264 in MP4, and read from whatever FFmpeg knows; the one file that imports PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import av
import numpy as np
from numpy.typing import NDArray


def write_video(frames: NDArray[np.uint8], path: Path, frames_per_second: int) -> None:
    """Write frames [F, H, W, 3]; H.264 halves the colour planes, so an odd side repeats its last line."""
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(path, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=frames_per_second, options={"crf": "14"})
        stream.width, stream.height, stream.pix_fmt = even.shape[2], even.shape[1], "yuv420p"
        for frame in even:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        file.mux(stream.encode(None))


def read_video(path: Path) -> NDArray[np.uint8]:
    """All frames: [F, H, W, 3]; a file is refused where its decoder complains, as it does of most broken bytes.

    Not of all: broken bytes that happen to decode show as wrong pixels, for frames in H.264 have no checksum.
    """
    try:
        with av.open(path) as file:
            if not file.streams.video:
                raise ValueError("it holds no video")
            file.streams.video[0].codec_context.thread_count = 1  # or its complaints would be another thread's
            with capture_ffmpeg_errors() as told:
                shown = [(frame.to_ndarray(format="rgb24"), frame.is_corrupt) for frame in file.decode(video=0)]
    except av.FFmpegError as error:  # some of which are no ValueError
        raise ValueError(str(error)) from error
    if not shown:
        raise ValueError("it holds no frames")
    broken = [place for place, (_, corrupt) in enumerate(shown) if corrupt]
    if broken or told:
        raise ValueError(f"its frame {broken[0]} is broken" if broken else f"its decoder says: {told[0]}")
    return np.stack([frame for frame, _ in shown]).astype(np.uint8)


class FFmpegLogCapture:
    """Whether FFmpeg speaks: a setting of the whole process, which the last thread that listens puts back."""

    def __init__(self) -> None:
        self._lock, self._threads = Lock(), 0
        self._level, self._once = av.logging.get_level(), True

    def begin(self) -> None:
        with self._lock:
            if not self._threads:
                self._level, self._once = av.logging.get_level(), av.logging.get_skip_repeated()
                av.logging.set_level(av.logging.ERROR)
                av.logging.set_skip_repeated(False)  # or what the file before was told would be kept from this one
            self._threads += 1

    def end(self) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                av.logging.set_level(self._level)
                av.logging.set_skip_repeated(self._once)


FFMPEG_LOG = FFmpegLogCapture()


@contextmanager
def capture_ffmpeg_errors() -> Iterator[list[str]]:
    """What FFmpeg calls an error in this thread, known at the end of the block."""
    told: list[str] = []
    FFMPEG_LOG.begin()
    try:
        with av.logging.Capture() as heard:
            yield told
        told += [message.strip() for _, _, message in heard]
    finally:
        FFMPEG_LOG.end()
