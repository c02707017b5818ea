"""Write videos as H.264 in MP4 and read any format of FFmpeg; the only module that imports PyAV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import av
import numpy as np
from numpy.typing import NDArray


def write_video(frames: NDArray[np.uint8], path: Path, frames_per_second: int) -> None:
    """Write frames [F, H, W, 3]; H.264 subsamples color, so an odd side is padded by its last line."""
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(path, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=frames_per_second, options={"crf": "14"})
        stream.width, stream.height, stream.pix_fmt = even.shape[2], even.shape[1], "yuv420p"
        for frame in even:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        file.mux(stream.encode(None))


def read_video(path: Path, check_pixels: Callable[[int, int, int], None], max_pixels: int) -> list[NDArray[np.uint8]]:
    """Read all frames, each [H, W, 3]; refuses a file if the decoder reports an error.

    `check_pixels` is called with width, height and frames as the file declares them, and with each frame that is
    decoded; FFmpeg itself refuses frames of more than `max_pixels`.

    H.264 has no checksums, so a few broken bytes decode to wrong pixels without an error.
    """
    try:
        with av.open(path, options={"max_pixels": str(max_pixels)}) as file:
            if not file.streams.video:
                raise ValueError("the file does not contain a video stream [TM251]")
            codec, declared = file.streams.video[0].codec_context, file.streams.video[0].frames
            codec.thread_count = 1  # errors are captured per thread
            codec.options = {"max_pixels": str(max_pixels)}
            check_pixels(codec.width, codec.height, max(1, declared))
            frames: list[NDArray[np.uint8]] = []
            corrupt: list[int] = []
            with capture_ffmpeg_errors() as errors:
                for frame in file.decode(video=0):
                    check_pixels(frame.width, frame.height, len(frames) + 1)
                    corrupt += [len(frames)] if frame.is_corrupt else []
                    frames.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
    except av.FFmpegError as error:  # some of which are no ValueError
        raise ValueError(f"the video cannot be decoded: {error} [TM826]") from error
    if not frames:
        raise ValueError("the video does not contain frames [TM252]")
    if corrupt or errors:
        reason = f"frame {corrupt[0]} is damaged" if corrupt else f"the decoder reports: {errors[0]}"
        raise ValueError(f"{reason} [TM827]")
    return frames


class FFmpegLogCapture:
    """Raises FFmpeg's log level, a setting of the process, until the last thread has stopped capturing."""

    def __init__(self) -> None:
        self._lock, self._threads = Lock(), 0
        self._level, self._once = av.logging.get_level(), True

    def begin(self) -> None:
        with self._lock:
            if not self._threads:
                self._level, self._once = av.logging.get_level(), av.logging.get_skip_repeated()
                av.logging.set_level(av.logging.ERROR)
                av.logging.set_skip_repeated(False)  # else equal errors of two files are logged once
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
    """Collect the errors that FFmpeg logs in this thread; the list is filled at the end of the block."""
    errors: list[str] = []
    FFMPEG_LOG.begin()
    try:
        with av.logging.Capture() as log:
            yield errors
        errors += [message.strip() for _, _, message in log]
    finally:
        FFMPEG_LOG.end()


def read_first_frame(path: Path, max_pixels: int) -> NDArray[np.uint8]:
    """Read the first frame of a video: [H, W, 3]; FFmpeg refuses one of more than `max_pixels`."""
    try:
        with av.open(path, options={"max_pixels": str(max_pixels)}) as file:
            for stream in file.streams.video:
                stream.codec_context.options = {"max_pixels": str(max_pixels)}
                if stream.codec_context.width * stream.codec_context.height > max_pixels:
                    raise ValueError(f"the video has frames of more than {max_pixels} pixels [TM1179]")
            frame = next(iter(file.decode(video=0)), None)
            if frame is not None:
                return np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
    except (av.FFmpegError, IndexError) as error:  # no video stream
        raise ValueError(f"the video cannot be decoded: {error} [TM1366]") from error
    raise ValueError("the video does not contain frames; write it again [TM1367]")
