"""For the tests of formats that others add (`unickpt.extend`): what holds for every one of them.

    from unickpt.testing import ReaderSuite

    class TestMyFormat(ReaderSuite):  # inherits all tests; see there what it has to say
        ...

Needs pytest, as zarr's tests of stores do.
"""

import pytest

pytest.register_assert_rewrite("unickpt.testing.readers")

from unickpt.testing.readers import ReaderSuite  # noqa: E402
from unickpt.testing.thread_groups import Threads  # noqa: E402

__all__ = ["ReaderSuite", "Threads"]
