"""An engine of the demo model that the tests of this room share."""

from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine


@pytest.fixture(scope="package")
def engine() -> Iterator[CompiledEngine]:
    sizes = {"bucket_sizes": (1, 2), "token_bucket_sizes": (64,), "num_kv_blocks": 64, "max_model_len": 256}
    with CompiledEngine(enforce_eager=True, progress="off", **sizes) as engine:
        yield engine
