"""What the interpreter refuses, it refuses with kept shapes as well."""

import pytest
import triton.language as tl

from tests.ops import interpreted


def sizes_that_are_no_integers_are_refused() -> None:
    tl.block_type(tl.float32, [2, 4])
    for size in (2.0, tl.constexpr(2.0)):
        with pytest.raises(TypeError, match="Shape element 0 must have type"):
            tl.block_type(tl.float32, [size, 4])


INTERPRETED = {"sizes that are no integers": sizes_that_are_no_integers_are_refused}

test_interpreted = interpreted.each_of(INTERPRETED)
