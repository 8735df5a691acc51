"""What a dead predecessor in an I/O seat left behind: descriptors that workers may still run."""

from __future__ import annotations

from meshd.prepare.job import Job, JobState
from meshd.prepare.lane import Lane
from meshd.slab import BodySlab


def take_over(lanes: tuple[Lane, ...], slab: BodySlab) -> None:
    """Void a dead predecessor's descriptors, and keep the slots they name until they are answered.

    ``slab`` must not have handed out a slot yet: this decides which ones are free.
    """
    orphans: dict[int, Job] = {}
    for lane in lanes:
        first = lane.end.taken
        for place, record in enumerate(lane.end.attach()):
            sequence, body_offset, view_offset, view_capacity, body_length = record[:5]
            job = orphans.get(view_offset)
            if job is None:
                slot = slab.quarantine(view_offset, view_capacity, body_offset, body_length)
                job = orphans[view_offset] = Job(0, 0, slot, body_length)
                job.state = JobState.CANCELLED
                job.is_release_due = True
            lane.adopt(job, first + place, sequence)
    slab.scrub()
