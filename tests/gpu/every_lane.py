"""CUDA sources for racecheck, in which every lane of a warp arrives at a barrier where one lane does for all.

The kernels hand memory from warp to warp by `__syncwarp()` and then one lane's arrival at an mbarrier. racecheck
credits such an arrival with the arriving lane's accesses alone, not with the other lanes' that `__syncwarp` has ordered
before it, and reports those. (On an H200, of the scales that sixteen lanes wrote and one arrived for, reads of fifteen
lanes' were reported.) So for it an arrival is worth 32: one of each lane, or 32 of a single thread's.
"""

from __future__ import annotations

import re

# what is found, what it becomes; the first three are codebook_shared.cuh's barriers, the others who arrives at them
BARRIERS = (
    (r'(mbarrier\.init\.shared\.b64 \[%0\], %1;" ::"r"\(barrier\), "r"\()(arrivals\))', r"\g<1>32 * \2"),
    (r"(mbarrier\.arrive\.shared\.b64 t, \[%0\])(; })", r"\1, 32\2"),
    (
        r"mbarrier\.arrive\.expect_tx\.shared\.b64 t, \[%0\], %1; }",
        r"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1; mbarrier.arrive.shared.b64 t, [%0], 32; }",
    ),
)
REMOTE = (r"(mbarrier\.arrive\.release\.cluster\.shared::cluster\.b64 _, \[%0\])(;)", r"\1, 32\2")
FIRST_LANE = r"if \((?:lane|leader|\((?:lane|thread|this_thread\(\)) & 31\)(?= == 0))(?: == 0)?\) barrier_arrive\("
EACH_LANE = "every_lane_arrives("
TWO_LANES = (
    r"if \(lane < 2\) barrier_arrive\((\w+) \+ SLOT_FULL\(lane\)\);",
    r"every_lane_arrives(\1), every_lane_arrives(\1 + SLOT_FULL(1));",
)
ARRIVES = """
DEVICE void every_lane_arrives(u32 barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait("""


def rewritten(source: str) -> str:
    """A kernel's whole source; as it is where it has no such barriers. Raises ValueError where their words changed."""
    if "barrier_arrive(" not in source:
        return source
    for pattern, by in BARRIERS:
        source, found = re.subn(pattern, by, source)
        if found != 1:
            raise ValueError(f"every_lane.py: the source has {found} of what was one: {pattern}")
    source = re.sub(*REMOTE, source)
    source, one = re.subn(FIRST_LANE, EACH_LANE, source)
    source, two = re.subn(*TWO_LANES, source)
    if one + two:
        source, found = re.subn(r"\nDEVICE void barrier_wait\(", ARRIVES.replace("\\", r"\\"), source)
        if found != 1:
            raise ValueError(f"every_lane.py: the source has {found} definitions of barrier_wait, not one")
    return source
