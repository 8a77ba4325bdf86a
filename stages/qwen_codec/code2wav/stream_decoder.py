"""Computes the windows of many streams, from the state that each stream's previous window left."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from stages.qwen_codec.code2wav.passes import Passes
from stages.qwen_codec.code2wav.streams import Place, StreamTable
from stages.qwen_codec.codec_layout import Code2WavLayout
from stages.qwen_codec.codec_window import CodecWindow


@dataclass(frozen=True)
class WindowJob:
    """A valid window, on the CPU."""

    window: CodecWindow
    codes: torch.Tensor
    """int64 [num_frames, codebooks]."""
    past: torch.Tensor
    """The frames of `CodecWindow.past`, int64 [num_past_frames, codebooks]."""

    @property
    def past_frames(self) -> range:
        """The absolute indices of `past`."""
        return range(self.window.first_frame - len(self.past), self.window.first_frame)


@dataclass
class _Track:
    """What is left to compute for one window."""

    slot: int
    codes: torch.Tensor
    num_silent: int
    """Frames at the beginning of `codes` that only rebuild the state."""
    seen: range
    """Frames whose effect is in the slot's state."""
    samples: list[torch.Tensor] = field(default_factory=list)

    @property
    def next_frames(self) -> int:
        """Frames that passes may compute together; 0 if the window is finished."""
        return self.num_silent or len(self.codes)


class StreamDecoder:
    """Computes windows in passes of several streams."""

    def __init__(self, passes: Passes, layout: Code2WavLayout) -> None:
        self._passes = passes
        self._layout = layout
        self.streams = StreamTable(passes.num_slots)

    @torch.inference_mode()
    def run(self, jobs: Sequence[WindowJob]) -> list[torch.Tensor]:
        """Returns the waveform of each window's frames, [num_frames * samples per frame], in the network's
        type on the CPU; a stream's first window has `lead_samples` less.

        Streams may be of any age and windows of any length; no two windows are of one stream."""
        windows = [job.window for job in jobs]
        places = self.streams.enter(windows)
        try:
            self._begin_with_pasts(jobs, places)
            tracks = [_track(job, place) for job, place in zip(jobs, places, strict=True)]
            self._finish(tracks)
            waveforms = [torch.cat(track.samples) for track in tracks]
            # One copy for all.
            on_host = torch.cat(waveforms).cpu()
        except BaseException:
            self.streams.abandon(places)
            raise
        self.streams.leave(windows, places, [track.seen for track in tracks])
        return list(on_host.split([len(waveform) for waveform in waveforms]))

    def _begin_with_pasts(self, jobs: Sequence[WindowJob], places: Sequence[Place]) -> None:
        """Compute each new past once, and copy the state that pasts leave to the windows' slots."""
        begins = [
            (job, place.slot, place.past) for job, place in zip(jobs, places, strict=True) if place.past
        ]
        new = {past.slot: job for job, _, past in begins if not past.is_computed}
        self._finish(
            [_Track(slot, job.past, len(job.past), job.past_frames[:0]) for slot, job in new.items()]
        )
        if begins:
            self._passes.state.copy([past.slot for _, _, past in begins], [slot for _, slot, _ in begins])

    def _finish(self, tracks: Sequence[_Track]) -> None:
        while unfinished := [track for track in tracks if track.next_frames]:
            self._compute_longest(unfinished)

    def _compute_longest(self, tracks: Sequence[_Track]) -> None:
        """Compute the next frames of the longest tracks in one pass; if it pads, of as many as it takes."""
        longest = sorted(tracks, key=lambda track: track.next_frames, reverse=True)
        length = self._passes.length(longest[0].next_frames)
        group = [
            (track, min(track.next_frames, length))
            for track in longest[: self._passes.max_num_streams(length)]
            if self._passes.pads or track.next_frames >= length
        ]
        codes = [F.pad(track.codes[:count], (0, 0, 0, length - count)) for track, count in group]
        places = [(track.slot, track.seen.stop, len(track.seen), count) for track, count in group]
        rows = self._passes.run(torch.stack(codes), torch.tensor(places))
        samples_per_frame = rows.shape[1] // length
        for (track, count), row in zip(group, rows, strict=True):
            if track.num_silent:
                track.num_silent -= count
            else:
                begin = 0 if track.seen.stop else self._layout.lead_samples
                track.samples.append(row[begin : count * samples_per_frame])
            track.codes = track.codes[count:]
            track.seen = range(track.seen.start, track.seen.stop + count)


def _track(job: WindowJob, place: Place) -> _Track:
    seen = place.seen if place.past is None else job.past_frames
    if seen is not None:
        return _Track(place.slot, job.codes, 0, seen)
    return _Track(place.slot, torch.cat((job.past, job.codes)), len(job.past), job.past_frames[:0])
