"""The one wait of tests that are scripts: it has a deadline, and its failure says what did not come."""
import inspect
import time

PATIENCE = 240  # seconds: a guard against hangs that ends before CTest's limit for a whole test; never an assertion


def wait_until(condition, what="", seconds=PATIENCE, every=0.02):
    """Returns the first true value of `condition`. The failure says `what`, a text or a function that gives one; without
    it the failure quotes the condition."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            said = what() if callable(what) else what or _source(condition)
            raise AssertionError(f"waited {seconds} s in vain: {said}")
        time.sleep(every)
    return found


def _source(condition):
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
