"""The shim: parent of one attempt's runs, which outlives the daemon. Standard library only, and on no other floor.

    spawner     one process per daemon that forks shims in a fraction of a millisecond
    shim        the shim itself: one event loop, one run at a time
    requests    what the daemon writes and asks, checked
    channel     its unix socket: JSON lines, bounded
    launch      what happens between fork and exec, and what a failed exec means
    notes       runs/NNNNNN: the marker before a run, the exit note after it
    log_format, log_writer    logs/NNNNNNNN.log
    tree        processes: who descends from whom, and how to end them all

The daemon uses tree, notes and log_format too; the rest belongs to the spawner's process and its children.
"""
