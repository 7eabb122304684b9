"""What all tests share: hypothesis profiles, a cache of their own, and when GPU tests run."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# "ci" tries the same examples as long as the sources stay the same (constants in them are tried
# too); HYPOTHESIS_PROFILE=fuzz tries new ones at every run.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fuzz",
    derandomize=False,
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache of kernels out of it; xdist's workers share the controller's."""
    if not hasattr(config, "workerinput"):
        os.environ["CUMHA_CACHE_DIR"] = tempfile.mkdtemp(prefix="cumha-test-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("CUMHA_CACHE_DIR"), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; asks CUDA only if there are GPU tests."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if gpu_tests else None
    if reason:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    try:
        import cupy
    except ImportError as error:
        return f"needs a GPU: CuPy cannot be imported ({error})"
    return None if cupy.cuda.is_available() else "needs a GPU: CuPy finds none"
