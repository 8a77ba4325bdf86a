"""Computes the windows of many streams, from the state that each stream's previous window left."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from stages.qwen3_omni.code2wav.network import Code2WavNetwork
from stages.qwen3_omni.code2wav.state import Step, StreamState
from stages.qwen3_omni.code2wav.streams import Place, StreamTable
from stages.qwen3_omni.codec_layout import Code2WavLayout
from stages.qwen3_omni.codec_window import CodecWindow

MAX_PIECE_FRAMES = 64
"""Frames of one stream that the network computes at a time. More, such as the past of a stream that lost its
state, take several passes, which give the same audio and limit the memory."""


@dataclass(frozen=True)
class WindowJob:
    """A valid window, on the CPU."""

    window: CodecWindow
    codes: torch.Tensor
    """int64 [num_frames, codebooks]."""
    past: torch.Tensor
    """The frames of `CodecWindow.past`, int64 [num_past_frames, codebooks]."""


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
    def next_piece(self) -> int:
        """Number of frames of the next pass, at least 1."""
        return min(self.num_silent or len(self.codes), MAX_PIECE_FRAMES)


class StreamDecoder:
    """The network with the state of all streams."""

    def __init__(
        self, network: Code2WavNetwork, layout: Code2WavLayout, *, num_slots: int, max_frames_per_pass: int
    ) -> None:
        """A pass has at most `max_frames_per_pass` frames in total, or one stream. Raises `ConfigError` if
        memory runs out."""
        self._network = network
        self._layout = layout
        self._max_frames_per_pass = max_frames_per_pass
        self._device = next(network.parameters()).device
        self.state = StreamState(network, num_slots)
        self.streams = StreamTable(num_slots)

    @torch.inference_mode()
    def run(self, jobs: Sequence[WindowJob]) -> list[torch.Tensor]:
        """Returns the waveform of each window's frames, [num_frames * samples per frame], in the network's
        type on the CPU; a stream's first window has `lead_samples` less.

        Streams may be of any age and windows of any length. Raises `ValueError` for two windows of one
        stream."""
        windows = [job.window for job in jobs]
        places = self.streams.enter(windows)
        try:
            tracks = [_track(job, place) for job, place in zip(jobs, places, strict=True)]
            while unfinished := [track for track in tracks if len(track.codes)]:
                for group in self._groups(unfinished):
                    self._advance(group)
            waveforms = [torch.cat(track.samples) for track in tracks]
            # One copy for all.
            on_host = torch.cat(waveforms).cpu()
        except BaseException:
            self.streams.abandon(places)
            raise
        self.streams.leave(windows, places, [track.seen for track in tracks])
        return list(on_host.split([len(waveform) for waveform in waveforms]))

    def _groups(self, tracks: Iterable[_Track]) -> Iterator[list[_Track]]:
        """Tracks whose next pieces have the same length."""
        by_length: defaultdict[int, list[_Track]] = defaultdict(list)
        for track in tracks:
            by_length[track.next_piece].append(track)
        for length, group in by_length.items():
            size = max(1, self._max_frames_per_pass // length)
            for start in range(0, len(group), size):
                yield group[start : start + size]

    def _advance(self, group: Sequence[_Track]) -> None:
        """Compute the next piece of each track; all have the same length."""
        length = group[0].next_piece
        codes = torch.stack([track.codes[:length] for track in group]).to(self._device)
        numbers = [[t.slot for t in group], [t.seen.stop for t in group], [len(t.seen) for t in group]]
        slots, positions, num_known = torch.tensor(numbers).to(self._device)
        rows = self._network(codes, Step(self.state, slots, positions, num_known))
        for track, row in zip(group, rows, strict=True):
            if track.num_silent:
                track.num_silent -= length
            else:
                track.samples.append(row if track.seen.stop else row[self._layout.lead_samples :])
            track.codes = track.codes[length:]
            track.seen = range(track.seen.start, track.seen.stop + length)


def _track(job: WindowJob, place: Place) -> _Track:
    if place.seen is not None:
        return _Track(place.slot, job.codes, 0, place.seen)
    begin = job.window.first_frame - len(job.past)
    return _Track(place.slot, torch.cat((job.past, job.codes)), len(job.past), range(begin, begin))
