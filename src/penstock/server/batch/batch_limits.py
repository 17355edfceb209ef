"""The bounds of files and batches, and the sizes and times of the machinery; tests pass others in.
It knows numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobLimits:
    """What one input file and one owner (a key's name) may have, and how batches are run."""

    # Of one input file.
    max_lines: int = 50_000
    max_file_bytes: int = 200_000_000
    max_line_bytes: int = 32 * 1024 * 1024  # also what a body over HTTP may have by default
    max_errors: int = 1_000  # told in full; of those beyond, the numbers alone
    # of those told in full, about: a page of batches has a hundred times as many
    max_error_bytes: int = 48 * 1024

    # Of one owner.
    max_unfinished: int = 1_000  # batches that aren't over; each is taken up at every start
    max_files: int = 10_000  # results among them: as many as one page lists

    # How they are run.
    running_batches: int = 8  # side by side
    checked_batches: int = 2  # whose lines are checked side by side
    # of lines at the engine, their texts and ids: six million tokens
    in_flight_bytes: int = 256 << 20
    large_line: int = 1 << 20  # bytes; two lines beyond wait for the engine with all of their ids
    read_bytes: int = 1 << 20  # of an input that are read at a time
    outbox_bytes: int = 32 << 20  # of outcomes on their way to the disk
    commit_seconds: float = 0.1  # that outcomes wait for others to share a sync with
    settled_seconds: float = (
        60.0  # before a suspect runs alone: an engine that dies sooner died of something else
    )
    first_pause: float = (
        0.5  # seconds before a batch that the disk failed is run again; doubled each time
    )
    longest_pause: float = 30.0

    # How they end with the server, in seconds.
    death_notice: float = (
        1.0  # an engine's client tells of its death 0.2 s after it is seen, and a disk takes a note
    )
    flush_seconds: float = 10.0  # that a disk gets to take what is done
    flush_seconds_dead: float = (
        2.0  # as much, where the engine died and the process has to end soon
    )
    flush_seconds_hurried: float = 0.5  # that are left once the end is to be now
