"""Limits of files and batches, and sizes and times of their machinery. Tests pass others. Knows
numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobLimits:
    """Limits of one input file and of one owner (an API key's name), and parameters of running
    batches."""

    # --- limits of one input file
    max_lines: int = 50_000
    max_file_bytes: int = 200_000_000
    max_line_bytes: int = 32 * 1024 * 1024  # default limit of an HTTP body too
    max_errors: int = 1_000  # errors listed in full; of more, only line numbers
    # approximate bytes of the errors listed in full; a page of batches has a hundred times as many
    max_error_bytes: int = 48 * 1024

    # --- limits of one owner
    max_unfinished: int = 1_000  # batches that aren't over; each is resumed at every start
    max_files: int = 10_000  # including results; as many as one page lists

    # --- running batches
    running_batches: int = 8  # batches that run side by side
    checked_batches: int = 2  # batches whose lines are checked side by side
    # bytes of the lines at the engine, texts and ids: six million tokens
    in_flight_bytes: int = 256 << 20
    # bytes; at most two larger lines wait for the engine with all of their ids
    large_line: int = 1 << 20
    read_bytes: int = 1 << 20  # bytes of an input that are read at a time
    outbox_bytes: int = 32 << 20  # bytes of outcomes that wait for the disk
    commit_seconds: float = 0.1  # seconds that outcomes wait to share a sync
    # seconds before a suspect line runs alone: an engine that dies sooner has another cause
    settled_seconds: float = 60.0
    # seconds before a batch runs again after a disk fault; doubled each time
    first_pause: float = 0.5
    longest_pause: float = 30.0

    # --- ending with the server, in seconds

    # the engine's death is reported within 0.2 s, and a note must reach the disk
    death_notice: float = 1.0
    flush_seconds: float = 10.0  # time for the disk to take the results
    # the same after the engine's death, when the process must end soon
    flush_seconds_dead: float = 2.0
    flush_seconds_hurried: float = 0.5  # time left after a second signal
