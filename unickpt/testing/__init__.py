"""For the tests of formats that others add (`unickpt.extend`): tests that hold for all formats.

    from unickpt.testing import ReaderSuite

    class TestMyFormat(ReaderSuite):  # inherits all tests; see there what it must define
        ...

Needs pytest, as zarr's tests of stores do.
"""

import pytest

pytest.register_assert_rewrite("unickpt.testing.readers")

from unickpt.testing.readers import ReaderSuite  # noqa: E402
from unickpt.testing.thread_groups import Threads  # noqa: E402

__all__ = ["ReaderSuite", "Threads"]
