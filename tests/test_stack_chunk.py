import resource

CALLS = 100
# Of this thread alone, where the system tells: threads of JAX and tensorstore have faults too.
WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def faults_of_calls_at(depth):
    """The page faults of CALLS calls, from a frame of that depth."""
    if depth:
        return faults_of_calls_at(depth - 1)
    before = resource.getrusage(WHOSE).ru_minflt
    for _ in range(CALLS):
        _called(*range(8))
    return resource.getrusage(WHOSE).ru_minflt - before


def _called(a, b, c, d, e, f, g, h):
    # Of a frame as large as the recursion's, so that one of the depths ends where no other fits.
    return [a, b, c, d, e, f, g, h]


def test_no_call_of_a_test_asks_the_system_for_a_chunk_of_the_stack():
    # A chunk of 16 KiB has room for fewer frames than that.
    assert max(faults_of_calls_at(depth) for depth in range(300)) < CALLS // 2
