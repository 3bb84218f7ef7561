"""Arrivals at mbarriers."""

import cutlass.cute as cute


def arrive(config, *bars):
    """This warp's arrival at each barrier, after all its lanes came here.

    config.every_lane: all lanes arrive, not one of them for all.  Slower, for race checkers that
    don't follow a warp's own synchronisation; a barrier then counts 32 arrivals of a warp.
    """
    cute.arch.sync_warp()
    if config.every_lane:
        for bar in bars:
            cute.arch.mbarrier_arrive(bar)
    else:
        with cute.arch.elect_one():
            for bar in bars:
                cute.arch.mbarrier_arrive(bar)
