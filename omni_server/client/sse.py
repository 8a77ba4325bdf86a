"""Server-sent events out of a byte stream that may be cut anywhere."""


class EventParser:
    """Collects the `data` of events; comments and other fields are skipped.

    Lines end in LF or CR LF. A lone CR, which the standard allows as well, is no line end here: servers that send
    JSON do not use it.
    """

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []
        """Pieces of a line without its end; joined once, so that the cost of a long line grows with its length only."""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that `piece` completes, in order."""
        if b"\n" not in piece:
            self._unfinished.append(piece)
            return []
        lines = b"".join([*self._unfinished, piece]).split(b"\n")
        self._unfinished = [lines.pop()]
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
