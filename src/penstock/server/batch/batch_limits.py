"""Limits of files and batches. Also sizes and times of the code that runs batches; tests pass other
values. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobLimits:
    """Limits of one input file and of one owner (an API key's name), and parameters of the code
    that runs batches."""

    # --- limits of one input file
    max_lines: int = 50_000
    max_file_bytes: int = 200_000_000
    # most bytes of a line; the same default as for HTTP bodies
    max_line_bytes: int = 32 * 1024 * 1024
    # errors that are listed in full; of further ones only line numbers are listed
    max_errors: int = 1_000
    # approximate bytes of the errors listed in full; a page of 100 batches may have 100 times as
    # many
    max_error_bytes: int = 48 * 1024

    # --- limits of one owner (an API key's name)
    max_unfinished: int = 1_000  # batches that have not ended; each is resumed at every start
    max_files: int = 10_000  # files, including results; one page of the list has room for all

    # --- parameters of running batches
    running_batches: int = 8  # most batches that run side by side
    checked_batches: int = 2  # most batches whose lines are checked side by side
    # bytes of the lines at the engine, texts and ids together; enough for six million tokens
    in_flight_bytes: int = 256 << 20
    # bytes of a large line; at most two large lines wait for the engine with their token ids in
    # memory
    large_line: int = 1 << 20
    read_bytes: int = 1 << 20  # bytes of an input that are read at a time
    outbox_bytes: int = 32 << 20  # bytes of results that wait to be written to the disk
    # seconds that results wait, so that several share a sync of the disk
    commit_seconds: float = 0.1
    # seconds that an engine must have run before a suspect line (poison_lines.py) runs alone; an
    # earlier death has another cause
    settled_seconds: float = 60.0
    # seconds before a batch runs again after a disk error; doubled each time
    first_pause: float = 0.5
    longest_pause: float = 30.0

    # --- seconds that batches get when the server ends

    # seconds for the engine's death to be noticed, within 0.2 s, and recorded on the disk
    death_notice: float = 1.0
    flush_seconds: float = 10.0  # seconds to write the results to the disk
    # seconds to write them after the engine's death, since the process must then end soon
    flush_seconds_dead: float = 2.0
    flush_seconds_hurried: float = 0.5  # seconds to write them after a second stop signal
