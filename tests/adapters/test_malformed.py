"""Each spoilt adapter is refused with a clear message, while requests of good ones go on."""

import re
from pathlib import Path

from compiled_llm import CompiledEngine, LoRARequest
from tests.adapters.made import embeddings_and_stacks, linear_modules, write_adapter
from tests.adapters.malformed import MALFORMED
from tests.e2e.test_lora import PARAMS, PROMPTS, SIZES, results
from tests.families import checkpoint, transformers_model


def test_all_are_refused_and_nobody_else_is_touched(tmp_path: Path) -> None:
    assert len(MALFORMED) >= 40
    model = transformers_model("qwen3-moe")
    modules = linear_modules(model) | {"lm_head": tuple(model.lm_head.weight.shape)}
    layers = modules, *embeddings_and_stacks(model)
    requests = [LoRARequest("good", str(write_adapter(tmp_path / "good", *layers)))]
    for number, (spoil, _) in enumerate(MALFORMED.values()):
        path = write_adapter(tmp_path / str(number), *layers)
        spoil(path)
        requests.append(LoRARequest("bad", str(path)))
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_target_modules": ("*",)}
    with CompiledEngine(str(checkpoint("qwen3-moe")), dtype="bfloat16", **SIZES, **lora) as engine:
        expected = results(engine, requests, range(1))
        prompts = [{"prompt_token_ids": PROMPTS[0]}] * len(requests)
        outputs = engine.generate(prompts, PARAMS, lora_request=requests, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == expected[0][0]
        for (name, (_, message)), request, output in zip(MALFORMED.items(), requests[1:], outputs[1:], strict=True):
            told = output.outputs[0].stop_reason
            assert output.outputs[0].finish_reason == "error", f"{name} is served"
            assert re.search(message, str(told)), f"{name}: {told}"
            assert request.lora_path in str(told), f"{name}: {told}"
            assert len(str(told)) < 2000, f"{name}: {told}"
        assert results(engine, requests, range(1)) == expected
