"""CPU time of another process, in nanoseconds' steps: /proc/PID/stat counts hundredths of a second (Linux)."""

import time

# Of MAKE_PROCESS_CPUCLOCK in the kernel's posix-timers.h: time that the scheduler gave to a process, all threads, those that
# have ended included.
CPUCLOCK_SCHED = 2


def cpu_s(pid: int) -> float:
    """User and system time so far."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
