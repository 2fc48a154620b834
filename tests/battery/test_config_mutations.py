"""B17: one field of a config.json spoilt or left out: equal logits to transformers', or a ValueError that names it."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import transformers

from tests.battery.config_mutations import CONFIGS, Mutation, Outcome, mutations, outcome

SAMPLE = 80  # mutations of the ordinary run

# Where transformers fails though the function from tokens to logits has nothing to do with the field -> why.
SERVED_ALONE = {
    "chunk_size": "how many tokens transformers' scan of Mamba takes at once; its result is the same for any",
    "dropout": "of training: torch's module refuses what is no probability",
    "pdrop": "likewise",
    "output_hidden_states": "what transformers returns beside the logits",
    "output_router_logits": "likewise",
    "pad_token_id": "of padding, which only transformers' embedding has a row for",
}
# The same of single values.
SERVED_ALONE_AS = {
    ("head_dim", "null"): "taken for absent, as transformers' classes do that declare the field",
    ("head_dim", "left out"): "hidden_size // num_attention_heads, as in transformers' Mistral",
    ("hidden_size_per_layer_input", "0"): "transformers' code takes a part of what is not there",
    ("rope_scaling", "null"): "how older versions wrote that there is none",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers remarks on spoilt fields."""
    told = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(told)


def complaint(mutation: Mutation, found: Outcome) -> str | None:
    """What is wrong with it."""
    if found.kind == "serves alone":
        field = mutation.path[-1]
        is_known = any(field.endswith(name) for name in SERVED_ALONE) or (field, mutation.value) in SERVED_ALONE_AS
        return None if is_known else f"transformers fails: {found.told}"
    return found.told if found.kind == "wrong" else None


def check(cases: list[Mutation], counts: Counter[str], *, ask_both: bool) -> None:
    complaints = []
    for mutation in cases:
        found = outcome(mutation, ask_both=ask_both)
        counts[found.kind] += 1
        told = complaint(mutation, found)
        if told is not None:
            complaints.append(f"{mutation}: {told}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.usefixtures("_one_thread")
def test_a_sample(battery_counts: Counter[str]) -> None:
    every = [mutation for model in CONFIGS for mutation in mutations(model)]
    assert len(every) > 5000
    check(random.Random(0).sample(every, SAMPLE), battery_counts, ask_both=False)
    assert battery_counts["equal"] > SAMPLE // 8
    assert battery_counts["refused"] > SAMPLE // 8


@pytest.mark.battery
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("model", CONFIGS)
def test_every_mutation(model: str, battery_counts: Counter[str]) -> None:
    check(mutations(model), battery_counts, ask_both=True)
    assert battery_counts["equal"] > 50
