"""``compiled-llm tune speculation``: what it reads, what it says, and what it refuses."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.commands.tune import speculation as command
from compiled_llm.commands.tune.speculation import main
from compiled_llm.offline.serving import with_seed
from compiled_llm.tuning import draft_recording, speculation
from compiled_llm.tuning.draft_replay import KnownDrafts, KnownRequest

PROGRAM = "compiled-llm tune speculation"
PHRASE = list(range(20, 40))
STEP_SECONDS = {
    "step_seconds": {
        "decode_1": 0.01,
        "decode_1x4": 0.011,
        "decode_1x16": 0.02,
        "decode_2": 0.01,
        "decode_2x8": 0.02,
        "tokens_64": 1.0,
    }
}


def result_line(number: int) -> dict[str, Any]:
    prompt = [*PHRASE, number, *PHRASE[:6]]
    return {"index": number, "prompt_token_ids": prompt, "token_ids": PHRASE[6:] * 2, "finish_reason": "length"}


def files(tmp_path: Path, lines: list[Any], seconds: Any = STEP_SECONDS) -> list[str]:
    """Flags for a trace of ``lines`` that no model is needed for."""
    trace, times = tmp_path / "trace.jsonl", tmp_path / "seconds.json"
    trace.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    times.write_text(json.dumps(seconds))
    return ["--trace", str(trace), "--step-seconds", str(times), "--batch-sizes", "1", "2"]


def test_a_replay_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[Any] = [result_line(number) for number in range(4)]
    lines += ["", {"index": 9, "error": {"message": "", "type": ""}}]
    lines[0] |= {"outputs": [{"token_ids": [50, 51, 52]}, {"token_ids": []}]}
    words = [*files(tmp_path, lines), "--model", "/no/such/directory", "--draft-tokens", "3", "7"]
    out = tmp_path / "out.json"
    assert main(PROGRAM, [*words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert (result["requests"], result["output_tokens"]) == (4, 3 * 28 + 3)
    assert len(result["candidates"]) == 2 * (4 + 1)
    assert result["plain_tokens_per_second"]["1"] == pytest.approx(100)
    best = result["best"]
    assert SpeculativeConfig.of(best).num_tokens in (3, 7)
    assert f"--speculative-config '{json.dumps(best)}'" in printed
    found = next(one for one in result["candidates"] if one["speculative_config"] == best)
    assert found["mean_accepted_length"] > 3
    assert 1.5 < found["ratio"]["1"] < 5
    assert sum(found["num_accepted_by_position"]) <= found["num_draft_tokens"]
    again = [*words[:3], str(out), *words[4:]]
    assert main(PROGRAM, again) == 0, "what --json wrote has the seconds of steps"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step_seconds"] == result["step_seconds"]


def test_no_method_for_new_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt_token_ids": [1, 2], "token_ids": list(range(100 * n, 100 * n + 20))} for n in range(1, 4)]
    assert main(PROGRAM, [*files(tmp_path, lines), "--max-requests", "1", "--prompt-lookups", "2-2"]) == 0
    out = capsys.readouterr().out
    assert "the first 1 of 3 requests are taken" in out
    assert "left out of --batch-sizes: 2, more than the 1 outputs" in out
    assert "no method promises 2% more over all of these" in out
    assert json.loads(out.splitlines()[-1])["best"] is None


def test_a_model_answers_and_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows without outputs beside results with texts as prompts."""
    line = "def area(width, height):\n    return width * height\n\n\n"
    with CompiledEngine(enforce_eager=True, bucket_sizes=(1,), max_num_batched_tokens=64, progress="off") as engine:
        ids = engine.tokenizer.encode(line)  # type: ignore[union-attr]
    lines = [
        {"prompt": line * 2 + line[:20], "sampling_params": {"temperature": 0}},
        {"messages": [{"role": "user", "content": line}], "sampling_params": {"n": 2, "max_tokens": 3}},
        {"index": 2, "prompt": line, "text": line, "token_ids": ids, "finish_reason": "stop"},
    ]
    words = [*files(tmp_path, lines)[:2], "--batch-sizes", "1", "4", "--max-tokens", "24", "--prompt-lookups", "1-3"]
    words += ["--draft-tokens", "3", "--enforce-eager", "--progress", "off", "--json", str(tmp_path / "out.json")]
    assert main(PROGRAM, words) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["requests"], result["output_tokens"]) == (4, 24 + 2 * 3 + len(ids))
    assert set(result["step_seconds"]) == {
        "decode_1",
        "decode_1x2",
        "decode_1x4",
        "decode_4",
        "decode_4x2",
        "decode_4x4",
    }
    assert min(result["step_seconds"].values()) > 0
    ngram, suffix = result["candidates"]
    assert ngram["num_drafts"] > 0 < suffix["num_drafts"]
    assert "2 requests of the trace have no output" in capsys.readouterr().out


def test_what_a_network_drafts_is_seen_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of sampled rows that are served first, and of an output that the model would not have given."""
    line = "def area(width, height):\n    return width * height\n\n\n"
    lines = [{"prompt": line * 2 + line[:20], "sampling_params": {"n": 2}}, result_line(3)]
    words = [*files(tmp_path, lines), "--max-tokens", "12", "--temperature", "0.8", "--draft-tokens", "1"]
    words += ["--methods", "ngram", "lookahead", "medusa", "--prompt-lookups", "1-3"]
    words += ["--drafters", f"medusa={DEMO_MODEL.parent / 'demo_drafters' / 'medusa'}"]
    assert main(PROGRAM, [*words, "--enforce-eager", "--progress", "off"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert "outputs that the trace has are taken to be sampled with max_tokens=12, temperature=0.8" in printed
    assert 'an engine starts with {"method": "medusa"' in printed
    assert result["output_tokens"] == 2 * 12 + 28
    assert 24 <= round(52 * result["sampled_again"]) < 52, "all of the first"
    assert "What a model would have drafted then is not known" in printed
    ngram, lookahead, medusa = result["candidates"]
    assert medusa["speculative_config"]["model"].endswith("medusa")
    assert min(ngram["num_drafts"], lookahead["num_drafts"]) > 0 == ngram.get("network_seconds", 0)
    assert set(medusa["network_seconds"]) == {"1", "2"}
    assert medusa["num_drafts"] > lookahead["num_drafts"]
    # Of one request at a time, behind each step: one for its prompt, and one for each token but those that were right.
    steps = 52 - sum(medusa["num_accepted_by_position"])
    assert medusa["draft_seconds"] > (steps - 3) * medusa["network_seconds"]["1"]


def test_a_result_of_batch_is_sampled_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its seed follows from the number of its row, and that of each continuation from the first one's."""
    sizes = {"bucket_sizes": (1,), "max_num_batched_tokens": 64, "enforce_eager": True, "progress": "off"}
    with CompiledEngine(**sizes) as engine:
        params = with_seed(SamplingParams(temperature=1, n=2, max_tokens=9, ignore_eos=True), engine.config.seed, 5)
        output = engine.generate("import os", params, use_tqdm=False)[0]
    outputs = [{"token_ids": one.token_ids, "finish_reason": "length"} for one in output.outputs]
    line = {"index": 5, "prompt_token_ids": output.prompt_token_ids, **outputs[0], "outputs": outputs}
    words = [*files(tmp_path, [line]), "--methods", "lookahead", "--draft-tokens", "1", "--temperature", "1"]
    assert main(PROGRAM, [*words, "--enforce-eager", "--progress", "off"]) == 0
    printed = capsys.readouterr().out
    assert "the model chose the same token in 100.0% of all places\nbest at" in printed
    assert json.loads(printed.splitlines()[-1])["sampled_again"] == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no", "trace.jsonl, line 1: is not JSON"),
        ([], "must be a JSON object"),
        ({"response": {}}, "OpenAI's format, which has no prompt"),
        ({"token_ids": [1]}, "must have prompt or prompt_token_ids beside its output"),
        ({"token_ids": [1], "prompt_token_ids": [1.0]}, "must have prompt or prompt_token_ids"),
        ({"text": "a", "prompt": "a"}, "token_ids must be a list of token ids, given None"),
        ({"token_ids": [-1], "prompt": "a"}, "token_ids must be a list of token ids"),
        ({"outputs": 3, "token_ids": [1], "prompt": "a"}, "outputs must be a list of objects"),
        ({"promt": "a"}, "unknown key: promt"),
        ("", "holds no request"),
        ({"prompt_token_ids": [1], "token_ids": [2]}, "must have more than one token"),
    ],
)
def test_bad_traces(line: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(PROGRAM, files(tmp_path, [line]))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([], "must be an object with step_seconds"),
        ({"step_seconds": {"decode_1": 1.0}}, "must have decode_1, and decode_1x2 or another with room for drafts"),
        ({"step_seconds": {"decode_1": 0}}, "decode_1 must be seconds above 0, given 0"),
        ({"step_seconds": {}, "one_graph": 1}, "one_graph must be true or false"),
    ],
)
def test_bad_seconds(seconds: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(PROGRAM, files(tmp_path, [result_line(0)], seconds))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_trees_are_tried_beside_chains() -> None:
    found = list(speculation.candidates(["ngram", "suffix"], [(2, 4)], [3], trees=True))
    assert [config.get("speculative_token_tree") for config in found] == [None, "auto", None, "auto"]
    assert found[1] == {**found[0], "speculative_token_tree": "auto"}


def test_a_trace_whose_prompts_are_answered_anew(tmp_path: Path) -> None:
    """As often and as long as they were; rows without outputs stay as they are."""
    lines = [
        {"prompt": "a", "sampling_params": {"n": 3}},
        {"index": 7, "prompt": "b", "token_ids": [1, 2], "outputs": [{"token_ids": [1, 2]}, {"token_ids": [3]}]},
        {"prompt_token_ids": [5, 6], "token_ids": [1, 2, 3, 4]},
    ]
    before = speculation.read_trace([Path(files(tmp_path, lines)[1])])
    made = speculation.to_be_served(before)
    rows = [line.row for line in made]
    assert made[0] == before[0]
    assert [(row.index, row.prompt, row.sampling) for row in rows if row is not None] == [
        (0, {"prompt": "a"}, {"n": 3}),
        (1, {"prompt": "b"}, {"n": 2, "max_tokens": 2}),
        (2, {"prompt_token_ids": [5, 6]}, {"n": 1, "max_tokens": 4}),
    ]


def test_new_outputs_are_as_many_and_as_long_as_flags_allow(tmp_path: Path) -> None:
    lines = [{"prompt": "b", "token_ids": [1, 2, 3], "outputs": [{"token_ids": [1, 2, 3]}, {"token_ids": [3]}]}]
    made = speculation.to_be_served(speculation.read_trace([Path(files(tmp_path, lines)[1])]), 2, greedy=True)
    assert made[0].row is not None
    assert made[0].row.sampling == {"n": 1, "max_tokens": 2}


def test_prompts_are_answered_anew_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedily, where the trace has two outputs of a prompt, and shorter than they were."""
    lines = [result_line(number) for number in range(2)]
    lines[0]["outputs"] = [{"token_ids": [1, 2, 3, 4]}, {"token_ids": [3]}]
    words = [*files(tmp_path, lines), "--serve-again", "--temperature", "0", "--max-tokens", "3", "--ignore-eos"]
    words += ["--methods", "lookahead", "--draft-tokens", "1", "3", "--enforce-eager", "--progress", "off"]
    assert main(PROGRAM, words) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert "2 requests of the trace have no output" in printed
    assert (result["requests"], result["output_tokens"], result["sampled_again"]) == (2, 6, 1.0)
    assert [one["speculative_config"]["num_speculative_tokens"] for one in result["candidates"]] == [1, 3]


def test_an_engine_that_cannot_start_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: Any, drafting: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(command, "_started", fail)
    words = [*files(tmp_path, [result_line(number) for number in range(2)]), "--draft-tokens", "3"]
    assert main(PROGRAM, [*words, "--methods", "suffix", "layer_skip"]) == 0
    printed = capsys.readouterr().out
    assert "is left out, as its engine cannot start: no room" in printed
    methods = [one["speculative_config"]["method"] for one in json.loads(printed.splitlines()[-1])["candidates"]]
    assert methods == ["suffix"]
    with pytest.raises(SystemExit):
        main(PROGRAM, [*words, "--methods", "layer_skip"])
    assert "no engine with one of --methods could start" in capsys.readouterr().err


def test_one_request_at_a_time_is_always_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the column of microseconds is of. An output of one token has no step to draft for."""
    measured: list[int] = []

    def of_networks(start: Any, requests: Any, configs: Any, sizes: Any) -> list[tuple[int, KnownDrafts]]:
        measured.extend(sizes)
        return [(0, KnownDrafts(seconds={1: 0.5, 2: 1.0}))]

    monkeypatch.setattr(draft_recording, "of_networks", of_networks)
    lines = [result_line(0), result_line(1), result_line(2) | {"token_ids": [5]}]
    seconds = {"step_seconds": {f"decode_{size}{more}": 0.01 for size in (2, 3) for more in ("", "x2")}}
    seconds["step_seconds"] |= {"decode_1": 0.01, "decode_1x2": 0.01}
    words = [*files(tmp_path, lines, seconds)[:-2], "2", "3", "--methods", "layer_skip", "--draft-tokens", "1"]
    assert main(PROGRAM, words) == 0
    printed = capsys.readouterr().out
    assert "left out of --batch-sizes: 3, more than the 2 outputs of two tokens or more" in printed
    assert measured == [1, 2]
    (found,) = json.loads(printed.splitlines()[-1])["candidates"]
    assert found["draft_seconds"] == pytest.approx(0.5 * 2 * 28, abs=0.01)


_MEDUSA = f"medusa={DEMO_MODEL.parent / 'demo_drafters' / 'medusa'}"


@pytest.mark.parametrize(
    ("words", "line", "message"),
    [
        (["--max-num-seqs", "1"], {}, "--batch-sizes must be at most --max-num-seqs, 1, given 2"),
        (["--methods", "lookahead", "--bad-words", "a"], {}, "--bad-words must be left out for --methods lookahead"),
        (["--methods", "mtp", "--allowed-token-ids", "3"], {}, "--allowed-token-ids must be left out for"),
        (["--methods", "lookahead", "--tensor-parallel-size", "2"], {}, "--tensor-parallel-size and"),
        (["--methods", "lookahead", "--trees"], {}, "--trees must be left out where no method has trees"),
        (["--drafters", _MEDUSA, _MEDUSA], {}, "must have each method once, given medusa twice"),
        (["--drafters", _MEDUSA, "--drafters", _MEDUSA], {}, "must have each method once, given medusa twice"),
        (["--drafters", "medusa=/no/such/heads"], {}, "/no/such/heads"),
        (["--drafters", _MEDUSA, "--draft-tokens", "9"], {}, "num_speculative_tokens must be at most 4, the heads of"),
        (["--serve-again", "--min-tokens", "3"], {}, "--min-tokens must be left out with --serve-again"),
        (["--truncate-prompt-tokens", "-1"], {}, "--truncate-prompt-tokens must be a number of tokens"),
        ([], {"lora": "a"}, "lora must be left out, as no adapters are served, given 'a'"),
        (["--methods", "lookahead"], {"sampling_params": {"min_tokens": 2}}, "line 1: min_tokens must be left out"),
        (["--temperature", "0"], {"sampling_params": {"n": 2}}, "line 1: n must be 1 with temperature=0"),
    ],
)
def test_what_would_be_ignored_or_fail_late_is_refused_before_an_engine_starts(
    words: list[str],
    line: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(command, "_started")
    lines: list[Any] = [{"prompt": "a", **line}] if line else [result_line(0)] * 2
    with pytest.raises(SystemExit) as ended:
        main(PROGRAM, [*files(tmp_path, lines), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_prompts_of_the_trace_are_encoded_as_flags_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[KnownRequest] = []

    def tune(found: Any, *others: Any, **named: Any) -> None:
        requests.extend(found)
        raise ValueError("seen")

    monkeypatch.setattr(speculation, "tune", tune)
    text = "<|endoftext|>" * 2
    lines = [{"prompt": text, "token_ids": [1, 2]}, {"prompt_token_ids": [5, 6, 7, 8], "token_ids": [1, 2]}]
    for words in ([], ["--split-special-tokens"], ["--truncate-prompt-tokens", "3", "--split-special-tokens"]):
        with pytest.raises(SystemExit):
            main(PROGRAM, [*files(tmp_path, lines), *words])
    found = [list(one.prompt_token_ids) for one in requests]
    assert len(found[0]) == 2 < len(found[2])
    assert found[1] == found[3] == [5, 6, 7, 8]
    assert found[4:] == [found[2][-3:], [6, 7, 8]]


@pytest.mark.parametrize("all_answered", [False, True])
def test_advice_is_of_use(all_answered: bool) -> None:
    known = [KnownRequest(line["prompt_token_ids"], line["token_ids"]) for line in map(result_line, range(2))]
    configs = list(speculation.candidates(["lookahead"], [(2, 4)], [3]))
    drafts = [(0, KnownDrafts(num_tokens=10, num_again=9))]
    result = speculation.tune(known, configs, [1], {(1, 1): 1.0, (1, 4): 1.0}, one_graph=True, drafts=drafts)
    text = speculation.text_of(result, all_answered=all_answered)
    assert "asked again, the model chose the same token in 90.0% of all places" in text
    assert ("--serve-again" in text) == ("prompts that were cut" in text) == (not all_answered)
    assert ("The model gave these outputs in this run" in text) == all_answered


def test_what_was_recorded_is_not_kept() -> None:
    """Each is replayed before the next one is asked for, and its tables are gone then."""
    known = [KnownRequest(line["prompt_token_ids"], line["token_ids"]) for line in map(result_line, range(2))]
    configs = list(speculation.candidates(["layer_skip"], [(2, 4)], [1, 2, 3]))
    alive: list[weakref.ref[KnownDrafts]] = []

    def recorded() -> Iterator[tuple[int, KnownDrafts | None]]:
        for place in (2, 0):
            assert not any(one() for one in alive)
            made = KnownDrafts({(0, 30): (20,)}, seconds={1: float(place)}, reading_seconds=1.0)
            alive.append(weakref.ref(made))
            yield place, made
            del made
        yield 1, None

    result = speculation.tune(known, configs, [1], {(1, 1): 1.0, (1, 4): 1.0}, one_graph=True, drafts=recorded())
    assert [rating.config for rating in result.ratings] == [configs[0], configs[2]], "in the order of candidates"
    assert [dict(rating.drafts.seconds) for rating in result.ratings if rating.drafts is not None] == [{1: 0}, {1: 2}]
    assert not any(rating.drafts.drafts for rating in result.ratings if rating.drafts is not None)


def test_networks_are_tried_with_few_numbers_of_drafts() -> None:
    found = list(speculation.candidates(["eagle3", "layer_skip"], [(2, 4)], trees=True, drafters={"eagle3": "d"}))
    assert [(one["num_speculative_tokens"], "speculative_token_tree" in one) for one in found] == [
        *((2, False), (3, False), (7, True), (15, True)),
        *((2, False), (4, False)),
    ]
    assert found[0] == {"method": "eagle3", "num_speculative_tokens": 2, "model": "d"}
    given = list(speculation.candidates(["medusa"], [(2, 4)], [4, 1], drafters={"medusa": "d"}))
    assert [one["num_speculative_tokens"] for one in given] == [1, 4]
    for config in found + given:
        SpeculativeConfig.of(config)


def test_seconds_never_fall_with_more_drafts() -> None:
    seconds = {(1, 1): 3.0, (1, 2): 1.0, (1, 4): 5.0, (4, 4): 6.0, (4, 8): 7.0}
    assert speculation.never_falling(seconds) == {**seconds, (1, 1): 2.0, (1, 2): 2.0}


def test_the_best_follows_from_the_seconds() -> None:
    """Where drafts cost as much as steps do, none are worth it; where they are free, the longest are."""
    known = [KnownRequest(line["prompt_token_ids"], line["token_ids"]) for line in map(result_line, range(3))]
    configs = list(speculation.candidates(["ngram"], [(2, 4)], [1, 15]))
    assert [config["num_speculative_tokens"] for config in configs] == [1, 15]
    for cost, best in ((1.0, None), (0.0, configs[1])):
        seconds = {(1, count): 1 + cost * (count - 1) for count in (1, 2, 4, 8, 16)}
        result = speculation.tune(known, configs, [1], seconds, one_graph=True)
        assert (None if result.best is None else result.best.config) == best
        assert all(rating.ratios[1] > 0.98 for rating in result.ratings)
