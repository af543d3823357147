import os

# The tests compile more than they compute.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    # JAX: two processes may reach for one entry at once; one of them compiles itself.
    config.addinivalue_line(
        "filterwarnings",
        "ignore:Error (reading|writing) persistent compilation cache entry:UserWarning",
    )
