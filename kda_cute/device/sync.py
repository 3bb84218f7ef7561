"""Arrivals at mbarriers, and named barriers."""

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


def meet(config, barrier: int, threads: int):
    """A named barrier of some threads.

    config.every_thread: of the CTA, whose other threads meet there as well.  Slower, for race
    checkers that don't follow barriers of some of its warps.
    """
    if config.every_thread:
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
